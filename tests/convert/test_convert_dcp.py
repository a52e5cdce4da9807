"""Out to directories of torch.distributed.checkpoint and back; and what torch itself writes there."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierload
from tests.convert.convert_support import export, filled, names, no_commit
from tests.hooks.dcp.states import LAYOUTS, empty_of, load, save, state_of, values
from tests.ranks.world import results
from tests.state.alike import assert_alike
from tierload.convert import dcp_folder
from tierload.state.dtypes import BY_NAME


def stock(folder: Path | str) -> dict[str, Any]:
    """All that torch finds in a directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(folder))


def a_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    dtypes = {name: filled(name, (3, 2)) for name in BY_NAME if name.startswith(("float8", "bf", "int", "bool"))}
    dtypes = {name: tensor for name, tensor in dtypes.items() if BY_NAME[name].code < 22 or BY_NAME[name].code > 36}
    rest = {"epoch": 3, "list": [1, 2], "tensors": [torch.ones(2), {"a": torch.zeros(())}], "t": (1, "x"), "b": b"1"}
    return {"model": dict(model.state_dict()), "dtypes": dtypes, "turned": torch.randn(3, 4).t(), **rest}


def test_out_and_back(tmp_path: Path) -> None:
    state = a_state()
    report = export(state, tmp_path / "out", format="dcp")
    assert (report.format, report.left_out) == ("dcp", ())
    assert [Path(file).name for file in report.files] == [".metadata", "__0_0.distcp"]
    assert_alike(_contiguous(stock(tmp_path / "out")), _contiguous(state))
    assert tierload.import_state(tmp_path / "out", tmp_path / "back").format == "dcp"
    assert_alike(_contiguous(tierload.load(tmp_path / "back")), _contiguous(state))


def _contiguous(value: Any) -> Any:
    """DCP keeps no strides."""
    if isinstance(value, dict):
        return {key: _contiguous(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_contiguous(inner) for inner in value]
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def test_what_dcp_cannot_hold_is_listed(tmp_path: Path) -> None:
    w = torch.ones(4)
    state = {
        "w": w,
        "tied": w,
        "empty": {},
        "only": {"empty": {}},
        "in": [{}, w],
        1: {2: 3},
        "sparse": torch.eye(3).to_sparse(),
        "rng": tierload.RNG(),
    }
    report = export(state, tmp_path / "out", format="dcp")
    left = {key for key, _ in report.left_out}
    assert {"empty", "only/empty", "in/#0", "sparse"} <= left
    assert {"#1", "#1/#2"} <= {key for key, _ in report.changed}
    assert report.ties["tied"] == "w"
    found = stock(tmp_path / "out")
    assert found["1"] == {"2": 3}
    assert found["in"][0] is None
    with pytest.raises(tierload.InvalidRequest, match=r"both 'a.b' in DCP"):
        export({"a": {"b": 1}, "a.b": 2}, tmp_path / "twice", format="dcp")
    with pytest.raises(tierload.InvalidRequest, match="--root"):
        export([1, 2], tmp_path / "list", format="dcp")
    assert names(tmp_path) == ["out"]


def test_a_directory_is_replaced_whole_and_only_if_it_is_one(tmp_path: Path) -> None:
    export({"a": 1}, tmp_path / "out", format="dcp")
    with pytest.raises(tierload.InvalidRequest, match="exists already"):
        tierload.export_state(tmp_path / "out.store", tmp_path / "out", format="dcp")
    export({"b": 2}, tmp_path / "other", format="dcp")
    tierload.export_state(tmp_path / "other.store", tmp_path / "out", format="dcp", force=True)
    assert stock(tmp_path / "out") == {"b": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(tierload.InvalidRequest, match="no directory of DCP"):
        tierload.export_state(tmp_path / "out.store", tmp_path / "mine", format="dcp", force=True)
    assert names(tmp_path) == ["mine", "other", "out"]


# What torch has written


def test_what_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tierload.save({"a": torch.ones(3)}, tmp_path / "store")
    tierload.export_state(tmp_path / "store", tmp_path / "out", format="dcp")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.startswith(".out.") and self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        tierload.export_state(tmp_path / "store", tmp_path / "out", format="dcp", force=True)
    monkeypatch.undo()
    assert (tmp_path / "out" / ".metadata").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def written(rank: int, ranks: int, folder: str) -> None:
    layouts = LAYOUTS[ranks]
    for number, (name, layout) in enumerate(layouts.items()):
        save(state_of(layout, number), storage_writer=dcp.FileSystemWriter(f"{folder}/{name}"))
    rows = layouts["rows"]
    save(state_of(rows, 9), storage_writer=dcp.FileSystemWriter(f"{folder}/apart"), use_collectives=False)
    several = dcp.FileSystemWriter(f"{folder}/several", single_file_per_rank=False, thread_count=2)
    save(state_of(rows, 9), storage_writer=several)


def read_back(rank: int, ranks: int, folder: str) -> bool:
    state = load(empty_of(LAYOUTS[ranks]["rows"]), storage_reader=dcp.FileSystemReader(folder))
    right = state_of(LAYOUTS[ranks]["rows"])["model"]
    return all(torch.equal(state["model"][name].to_local(), right[name].to_local()) for name in right)


def test_what_four_ranks_have_written_is_imported_whole(tmp_path: Path) -> None:
    results(4, written, str(tmp_path))
    cases = dict(zip(LAYOUTS[4], range(9), strict=False)) | {"apart": 9, "several": 9}
    for name, seed in cases.items():
        report = tierload.import_state(tmp_path / name, tmp_path / "store", step=seed)
        found: Any = tierload.load(tmp_path / "store", commit=report.commit)
        right = values(seed)
        assert found["model"].keys() == right.keys(), name
        assert all(torch.equal(found["model"][key], tensor) for key, tensor in right.items()), name
        assert found["rest"]["n"] == 3 + seed
    tierload.export_state(tmp_path / "store", tmp_path / "out", step=0, format="dcp")
    assert results(2, read_back, str(tmp_path / "out")) == [True, True]


# Damage and malice

Change = Callable[[Any], None]


class Boom:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/tierload-boom",)


def _moved(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("b")].relative_path = "../outside.distcp"


def _short(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([2, 4])


def _long(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0, 0])].length = 10**12


def _another_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def _no_place(metadata: Any) -> None:
    metadata.storage_data.clear()


def _same_path(metadata: Any) -> None:
    metadata.planner_data["w"] = metadata.planner_data["b"]


def _text_for_a_path(metadata: Any) -> None:
    metadata.planner_data["w"] = "wx"


def _huge_list(metadata: Any) -> None:
    metadata.planner_data["w"] = ("list", 10**9)


def _strange(metadata: Any) -> None:
    metadata.state_dict_metadata["w"] = 3


def _code(metadata: Any) -> None:
    metadata.planner_data = {"w": Boom()}


def _extended(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("b")].transform_descriptors = ["stream.zstd"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_moved, "outside.distcp' is not there"),
        (_short, "not made up of its parts"),
        (_long, "ends before byte"),
        (_another_dtype, "no part of"),
        (_no_place, "does not say where"),
        (_same_path, "stands where another one does"),
        (_text_for_a_path, "'w' has a str for a path"),
        (_huge_list, "some of which are missing"),
        (_strange, "neither a tensor nor a value"),
        (_code, "read safely: it names posix.system"),
        (_extended, "stream.zstd"),
    ],
)
def test_damaged_and_hostile_metadata_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    save({"w": torch.ones(3, 4), "b": [1]}, storage_writer=dcp.FileSystemWriter(tmp_path / "in"), no_dist=True)
    path = tmp_path / "in" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(tierload.CorruptFile, match=words):
        tierload.import_state(tmp_path / "in", tmp_path / "store")
    assert no_commit(tmp_path / "store")
    assert not Path("/tmp/tierload-boom").exists()


def test_metadata_with_a_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "n": {"list": [torch.ones(1), 2], "t": "x"}}
    save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "in"), no_dist=True)
    path = tmp_path / "in" / ".metadata"
    data = path.read_bytes()
    refused = 0
    for place in range(0, len(data), 2):
        for change in (1, data[place] ^ ord(".")):
            path.write_bytes(data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])
            try:
                dcp_folder.read(tmp_path / "in")
            except tierload.CorruptFile:
                refused += 1
    assert refused > len(data) / 2


def test_a_value_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save({"config": Boom}, storage_writer=dcp.FileSystemWriter(tmp_path / "in"), no_dist=True)
    with pytest.raises(tierload.CorruptFile, match=r"'config'.*could run any code"):
        tierload.import_state(tmp_path / "in", tmp_path / "store")


def test_few_bytes_that_are_shown_many_times_are_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(3, 4)}, storage_writer=dcp.FileSystemWriter(tmp_path / "in"), no_dist=True)
    path = tmp_path / "in" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (info,) = metadata.storage_data.values()
    torch.save(torch.ones(1).expand(3, 4), tmp_path / "in" / info.relative_path)
    info.length = (tmp_path / "in" / info.relative_path).stat().st_size
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(tierload.CorruptFile, match="shows its bytes several times"):
        tierload.import_state(tmp_path / "in", tmp_path / "store")


def test_data_that_is_flipped_cut_or_gone_is_refused(tmp_path: Path) -> None:
    save({"w": torch.arange(40.0)}, storage_writer=dcp.FileSystemWriter(tmp_path / "in"), no_dist=True)
    path = tmp_path / "in" / "__0_0.distcp"
    data = path.read_bytes()
    at = data.index(torch.arange(40.0).numpy().tobytes())
    for place in (at, at + 80, at + 159):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(tierload.CorruptFile, match=r"'w', at byte"):
            tierload.import_state(tmp_path / "in", tmp_path / "store")
    path.write_bytes(data[: at + 8])
    with pytest.raises(tierload.CorruptFile, match="ends before byte"):
        tierload.import_state(tmp_path / "in", tmp_path / "store")
    path.unlink()
    with pytest.raises(tierload.CorruptFile, match="is not there"):
        tierload.import_state(tmp_path / "in", tmp_path / "store")


def test_a_save_that_did_not_finish_is_no_checkpoint(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "in"), no_dist=True)
    (tmp_path / "in" / ".metadata").unlink()
    with pytest.raises(tierload.CorruptFile, match="did not finish"):
        tierload.import_state(tmp_path / "in", tmp_path / "store", format="dcp")
