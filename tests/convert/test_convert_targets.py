"""What appears where: which commit and keys, shards, overwriting, modes, a full disk."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tierload
from tests.convert.convert_support import export, names
from tests.state.alike import assert_alike
from tierload.convert import safetensors_file, torch_file

LARGE = {f"layer.{number}": torch.full((1000,), float(number)) for number in range(7)} | {"big": torch.zeros(9000)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two steps and a tag."""
    with tierload.Store(tmp_path / "store", mode="w") as opened:
        for step in (1, 2):
            model = {"w": torch.full((4,), float(step)), "b": torch.zeros(2)}
            opened.save({"model": model, "other": [torch.ones(3)], "[x]": torch.ones(1)}, step=step)
        opened.tag("best", 1)
    return tmp_path / "store"


@pytest.fixture(params=[".safetensors", ".pt"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"a{request.param}"


def read(path: Path) -> object:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def test_which_commit(store: Path, tmp_path: Path) -> None:
    with tierload.open(store) as opened:
        first = opened.find(step=1)
    for number, options in enumerate(({}, {"step": 1}, {"tag": "best"}, {"commit": first.id[:12]}, {"commit": first})):
        report = tierload.export_state(store, tmp_path / f"{number}.safetensors", **options)
        expected = 1 if options else 2
        assert report.commit.step == expected
        assert load_file(tmp_path / f"{number}.safetensors")["model/w"].tolist() == [expected] * 4
    with pytest.raises(tierload.CommitNotFound):
        tierload.export_state(store, tmp_path / "x.pt", step=3)


def test_keys_and_root(store: Path, target: Path) -> None:
    tierload.export_state(store, target, root="model")
    assert_alike(dict(sorted(read(target).items())), {"b": torch.zeros(2), "w": torch.full((4,), 2.0)})
    tierload.export_state(store, target, keys=["model/w", "other"], force=True)
    assert len(tierload.import_state(target, target.parent / "back").files) == 1
    assert tierload.load(target.parent / "back").keys() in ({"model/w", "other/#0"}, {"model", "other"})
    tierload.export_state(store, target, root="model", keys="model/b", force=True)
    assert_alike(read(target), {"b": torch.zeros(2)})
    if target.suffix == ".pt":
        tierload.export_state(store, target, root="[x]", force=True)
        assert_alike(read(target), torch.ones(1))
    for wrong in ({"root": "nothing"}, {"root": "model/w/x"}, {"keys": "model/x*"}):
        with pytest.raises(tierload.KeyMismatch):
            tierload.export_state(store, target, force=True, **wrong)


def test_an_open_store_can_be_exported(store: Path, target: Path) -> None:
    with tierload.open(store) as opened:
        tierload.export_state(opened, target, root="model")
        assert opened.head() is not None
    assert read(target)["w"].tolist() == [2.0] * 4


def test_what_is_there_is_replaced_only_when_asked(store: Path, target: Path) -> None:
    target.write_bytes(b"mine")
    with pytest.raises(tierload.InvalidRequest, match="exists"):
        tierload.export_state(store, target)
    assert target.read_bytes() == b"mine"
    tierload.export_state(store, target, force=True)
    assert len(read(target)) == 3 or len(read(target)) == 4
    assert names(target.parent) == [target.name]


def test_modes_are_those_of_the_umask_or_of_what_was_there(store: Path, target: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o002, 0o664), (0o027, 0o640)):
        before = os.umask(umask)
        try:
            target.unlink(missing_ok=True)
            tierload.export_state(store, target)
        finally:
            os.umask(before)
        assert stat.S_IMODE(target.stat().st_mode) == mode
    target.chmod(0o604)
    tierload.export_state(store, target, force=True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o604


def test_a_link_stays_a_link(store: Path, target: Path) -> None:
    real = target.parent / "real"
    real.mkdir()
    target.symlink_to(real / target.name)
    tierload.export_state(store, target)
    assert target.is_symlink()
    assert names(real) == [target.name]


def test_a_mapped_file_that_is_replaced_keeps_its_content(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    tierload.export_state(store, target, step=1)
    mapped = load_file(target)
    tierload.export_state(store, target, step=2, force=True)
    assert mapped["model/w"].tolist() == [1.0] * 4


def test_shards_and_their_index(tmp_path: Path) -> None:
    report = export(LARGE, tmp_path / "model", max_shard_bytes=10_000)
    folder = tmp_path / "model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    assert names(folder) == [*shards, "model.safetensors.index.json"]
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in LARGE.values())}
    whole: dict[str, torch.Tensor] = {}
    for shard in shards:
        part = load_file(folder / shard)
        assert {index["weight_map"][name] for name in part} == {shard}
        assert sum(tensor.nbytes for tensor in part.values()) <= 10_000 or part.keys() == {"big"}
        whole |= part
    assert_alike({name: whole[name] for name in LARGE}, LARGE)
    assert sorted(map(Path, report.files)) == sorted(folder.iterdir())
    for number, source in enumerate((folder, folder / "model.safetensors.index.json", [folder / n for n in shards])):
        tierload.import_state(source, tmp_path / f"back{number}")
        back = tierload.load(tmp_path / f"back{number}")
        assert_alike({name: back[name] for name in LARGE}, LARGE)


def test_transformers_style_index_reading(tmp_path: Path) -> None:
    """The way transformers and accelerate read a folder: the index, then the tensors of each shard."""
    tied = LARGE | {"tied": LARGE["layer.0"], "step": 5}
    export(tied, tmp_path / "model", max_shard_bytes=10_000)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert "tied" not in index["weight_map"]
    tierload.import_state(tmp_path / "model", tmp_path / "back")
    back = tierload.load(tmp_path / "back")
    assert back["step"] == 5
    assert back["tied"].data_ptr() == back["layer.0"].data_ptr()


def test_a_folder_that_one_file_is_enough_for(tmp_path: Path) -> None:
    export(LARGE, tmp_path / "model", max_shard_bytes=10**9)
    assert names(tmp_path / "model") == ["model.safetensors"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there/config.json").write_text("{}")
    export({"w": torch.ones(1)}, tmp_path / "there")
    assert names(tmp_path / "there") == ["config.json", "model.safetensors"]
    report = tierload.import_state(tmp_path / "there", tmp_path / "back")
    assert report.skipped == (str(tmp_path / "there/config.json"),)


def test_another_number_of_shards_replaces_all_of_the_old_ones(tmp_path: Path, store: Path) -> None:
    export(LARGE, tmp_path / "model", max_shard_bytes=10_000)
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(tierload.InvalidRequest, match=r"model\.safetensors\.index\.json exists"):
        tierload.export_state(store, tmp_path / "model", max_shard_bytes=20)
    tierload.export_state(store, tmp_path / "model", root="model", max_shard_bytes=20, force=True)
    left = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert names(tmp_path / "model") == ["config.json", *left]
    tierload.export_state(store, tmp_path / "model", root="model", force=True)
    assert names(tmp_path / "model") == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("to", "options", "what"),
    [
        ("a", {}, "does not say the format"),
        ("a.zip", {}, "does not say the format"),
        ("a.pt", {"format": "onnx"}, "no format 'onnx'"),
        ("folder/", {"format": "torch"}, "one file"),
        ("there.safetensors", {"max_shard_bytes": 10, "force": True}, "folder"),
    ],
)
def test_requests_that_make_no_sense(store: Path, to: str, options: dict[str, object], what: str) -> None:
    (store.parent / "there.safetensors").write_bytes(b"")
    with pytest.raises(tierload.InvalidRequest, match=what):
        tierload.export_state(store, f"{store.parent}/{to}", **options)
    assert names(store.parent) == ["there.safetensors"]


def test_a_format_that_the_name_does_not_say(store: Path, tmp_path: Path) -> None:
    tierload.export_state(store, tmp_path / "weights", format="safetensors", root="model")
    assert load_file(tmp_path / "weights").keys() == {"w", "b"}
    tierload.import_state(tmp_path / "weights", tmp_path / "back", format="safetensors")
    assert tierload.load(tmp_path / "back")["w"].tolist() == [2.0] * 4


@pytest.fixture
def full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    with tierload.Store(tmp_path / "store", mode="w") as store:
        store.save(LARGE)
    return tmp_path / "store"


def test_a_full_disk_leaves_nothing(large: Path, target: Path, full_disk: None) -> None:
    with pytest.raises(OSError, match="File too large") as caught:
        tierload.export_state(large, target)
    assert caught.value.errno
    assert names(target.parent) == []


def test_a_full_disk_leaves_what_was_there(large: Path, target: Path, full_disk: None) -> None:
    target.write_bytes(b"mine")
    with pytest.raises(OSError, match="File too large"):
        tierload.export_state(large, target, force=True)
    assert names(target.parent) == [target.name]
    assert target.read_bytes() == b"mine"


def test_a_full_disk_leaves_no_shards(large: Path, tmp_path: Path, full_disk: None) -> None:
    with pytest.raises(OSError, match="File too large"):
        tierload.export_state(large, tmp_path / "deep/model", max_shard_bytes=10_000)  # the last one does not fit
    assert names(tmp_path) == []


@pytest.mark.parametrize("at", [0, -1])
def test_what_does_not_read_back_gets_no_name(
    store: Path, target: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = safetensors_file if target.suffix == ".safetensors" else torch_file
    write = module.write

    def failing(*arguments: object) -> None:
        write(*arguments)
        path = arguments[-1]
        assert isinstance(path, Path)
        data = bytearray(path.read_bytes())
        position = data.index(torch.full((4,), 2.0).numpy().tobytes()) + 3 if at else at
        data[position] ^= 0x40
        path.write_bytes(data)

    monkeypatch.setattr(module, "write", failing)
    with pytest.raises(tierload.CorruptFile, match=r"a\.(safetensors|pt)"):
        tierload.export_state(store, target)
    assert names(target.parent) == []


def test_a_damaged_store_is_not_exported(large: Path, target: Path) -> None:
    (segment,) = (large / "seg").iterdir()
    data = bytearray(segment.read_bytes())
    data[10] ^= 1
    segment.write_bytes(data)
    with pytest.raises(tierload.CorruptPage):
        tierload.export_state(large, target)
    assert names(target.parent) == []


def test_a_store_in_use_can_be_exported_and_a_held_one_imported_into(tmp_path: Path) -> None:
    tierload.save({"w": torch.ones(2)}, tmp_path / "store", step=1)
    tierload.export_state(tmp_path / "store", tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "b.safetensors")
    tierload.import_state(tmp_path / "b.safetensors", tmp_path / "store", step=2)
    assert [commit.step for commit in tierload.open(tmp_path / "store").commits()] == [2, 1]
    assert tierload.load(tmp_path / "store")["w"].tolist() == [0, 0]
    assert tierload.load(tmp_path / "store", step=1)["w"].tolist() == [1, 1]
