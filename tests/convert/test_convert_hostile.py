"""Sources that are damaged, incomplete or want to run code: a clear error, and no commit."""

from __future__ import annotations

import collections
import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tierload
from tests.convert.convert_support import entry, names, no_commit, raw_file
from tests.state.alike import assert_alike
from tierload import CorruptFile, InvalidRequest

GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [4], 8, 12)}


def refused(sources: object, error: type[Exception], what: str, store: Path, **options: Any) -> None:
    with pytest.raises(error, match=what) as caught:
        tierload.import_state(sources, store, **options)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 600
    assert no_commit(store)


HEADERS: dict[str, tuple[dict[str, Any] | bytes, bytes, int | None, str]] = {
    "a huge header": (GOOD, bytes(12), 1 << 60, "header too large"),
    "a header beyond the file": (GOOD, bytes(12), 5000, "header"),
    "a header that is cut": (GOOD, bytes(12), 40, "header"),
    "no JSON": (b"{]", b"", None, "header"),
    "no object": (b"[1]", b"", None, "header"),
    "data that is cut": (GOOD, bytes(11), None, "header"),
    "data that is too long": (GOOD, bytes(13), None, "header"),
    "overlapping offsets": (GOOD | {"b": entry("U8", [4], 4, 8)}, bytes(12), None, "offset.*`b`"),
    "a hole": (GOOD | {"b": entry("U8", [4], 9, 13)}, bytes(13), None, "offset.*`b`"),
    "offsets backwards": (GOOD | {"b": entry("U8", [4], 12, 8)}, bytes(12), None, "offset.*`b`"),
    "a shape of more": (GOOD | {"b": entry("U8", [5], 8, 12)}, bytes(12), None, "`b`|header"),
    "a shape that overflows": (GOOD | {"b": entry("U8", [1 << 62, 1 << 62], 8, 12)}, bytes(12), None, "header"),
    "a negative shape": (GOOD | {"b": entry("U8", [-4], 8, 12)}, bytes(12), None, "header"),
    "an unknown dtype": (GOOD | {"b": entry("Q3", [4], 8, 12)}, bytes(12), None, "header"),
    "a dtype that torch lacks": (GOOD | {"b": entry("F6_E2M3", [4], 8, 11)}, bytes(11), None, "tensor 'b'.*F6_E2M3"),
    "texts that are none": (GOOD | {"__metadata__": {"a": 1}}, bytes(12), None, "header"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_safetensors(tmp_path: Path, name: str) -> None:
    header, data, length, what = HEADERS[name]
    path = raw_file(tmp_path / "bad.safetensors", header, data, length=length)
    refused(path, CorruptFile, rf"bad\.safetensors.*({what})", tmp_path / "store")


@pytest.mark.parametrize("content", [b"", b"abc", b"\x00" * 8, b"PK\x03\x04" * 100])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".ckpt"])
def test_no_such_file_at_all(tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / f"bad{suffix}").write_bytes(content)
    refused(tmp_path / f"bad{suffix}", CorruptFile, rf"bad\{suffix}", tmp_path / "store")


OWN = {
    "no JSON": "{",
    "no document": "3",
    "another document": '{"version":1,"root":{"d":{"ties":{"d":{}}}}}',
    "no dict": '{"version":1,"root":{"d":{"ties":[],"values":{"d":{}},"modules":{"d":{}}}}}',
    "a tie to nothing": '{"version":1,"root":{"d":{"ties":{"d":{"c":"x"}},"values":{"d":{}},"modules":{"d":{}}}}}',
    "a tie of a tensor": '{"version":1,"root":{"d":{"ties":{"d":{"b":"a"}},"values":{"d":{}},"modules":{"d":{}}}}}',
    "a tie to a number": '{"version":1,"root":{"d":{"ties":{"d":{"b":1}},"values":{"d":{}},"modules":{"d":{}}}}}',
    "a value of a tensor": '{"version":1,"root":{"d":{"ties":{"d":{}},"values":{"d":{"a":1}},"modules":{"d":{}}}}}',
    "a pickle": '{"version":1,"root":{"d":{"ties":{"d":{}},"values":{"d":{"x":{"pickle":"gA=="}}},'
    '"modules":{"d":{}}}}}',
    "a tensor": '{"version":1,"root":{"d":{"ties":{"d":{}},"values":{"d":{"x":{"t":{"chunk":0,"shape":[1]}}}},'
    '"modules":{"d":{}}}}}',
    "a newer version": '{"version":2,"root":{"d":{}}}',
}


@pytest.mark.parametrize("name", OWN)
def test_a_forged_text_of_ours(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "bad.safetensors", metadata={"tierload": OWN[name]})
    refused(tmp_path / "bad.safetensors", CorruptFile, r"bad\.safetensors", tmp_path / "store")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._proof}",)


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_that_would_run_code(tmp_path: Path, old: bool) -> None:
    state = {"w": torch.ones(2), "x": Malicious(tmp_path / "proof")}
    torch.save(state, tmp_path / "bad.pt", _use_new_zipfile_serialization=not old)
    refused(tmp_path / "bad.pt", CorruptFile, r"bad\.pt: refused.*system", tmp_path / "store")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(state["x"]))
    refused(tmp_path / "plain.bin", CorruptFile, r"plain\.bin", tmp_path / "store")
    assert not (tmp_path / "proof").exists()


def test_a_whole_module_in_a_file(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    refused(tmp_path / "model.pt", CorruptFile, r"model\.pt: refused.*Linear", tmp_path / "store")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_file_of_torch_that_is_cut(tmp_path: Path, part: float) -> None:
    torch.save({"w": torch.randn(1000)}, tmp_path / "bad.pt")
    data = (tmp_path / "bad.pt").read_bytes()
    (tmp_path / "bad.pt").write_bytes(data[: int(len(data) * part)])
    refused(tmp_path / "bad.pt", CorruptFile, r"bad\.pt", tmp_path / "store")


@pytest.mark.parametrize("checked", [True, False])
def test_a_flipped_bit_in_a_file_of_torch(tmp_path: Path, checked: bool) -> None:
    """torch.load does not see it; a file written without checksums has to be taken as it is."""
    torch.serialization.set_crc32_options(checked)
    try:
        torch.save({"w": torch.ones(1000)}, tmp_path / "bad.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    data = bytearray((tmp_path / "bad.pt").read_bytes())
    data[data.index(torch.ones(10).numpy().tobytes()) + 400] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    assert not torch.equal(torch.load(tmp_path / "bad.pt", weights_only=True)["w"], torch.ones(1000))
    if checked:
        refused(tmp_path / "bad.pt", CorruptFile, r"bad\.pt.*CRC", tmp_path / "store")
    else:
        tierload.import_state(tmp_path / "bad.pt", tmp_path / "store")


def test_a_file_of_torch_that_was_packed_again(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    refused(tmp_path / "b.pt", CorruptFile, r"b\.pt.*compressed", tmp_path / "store")


class Forged:
    """Pickled as a view of ``tensor`` that its storage may not have."""

    def __init__(self, tensor: torch.Tensor, *view: object) -> None:
        self._content = (tensor._typed_storage(), *view, False, collections.OrderedDict())

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return torch._utils._rebuild_tensor_v2, self._content


@pytest.mark.parametrize("view", [(0, (10**6,), (1,)), (3, (4,), (-1,)), (10**9, (4,), (1,)), (-3, (4,), (1,))])
def test_a_view_beyond_its_memory(tmp_path: Path, view: tuple[object, ...]) -> None:
    torch.save({"w": Forged(torch.ones(4), *view)}, tmp_path / "bad.pt")
    refused(tmp_path / "bad.pt", CorruptFile, r"bad\.pt", tmp_path / "store")


def test_an_element_that_is_shown_a_million_million_times(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "a.pt")
    tierload.import_state(tmp_path / "a.pt", tmp_path / "store")
    assert tierload.load(tmp_path / "store")["w"].shape == (10**6, 10**6)


def test_what_the_store_cannot_hold(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "bare": torch.ones(2, 2, device="meta")}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", tierload.UnsupportedValue, "bare.*meta", tmp_path / "store")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "no.pt", FileNotFoundError, r"no\.pt", tmp_path / "store")


def test_a_file_of_no_known_format(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"x")
    refused(tmp_path / "a.h5", InvalidRequest, r"a\.h5.*format", tmp_path / "store")
    refused(tmp_path / "a.h5", InvalidRequest, "no format 'h5'", tmp_path / "store", format="h5")
    refused(tmp_path / "a.h5", CorruptFile, r"a\.h5", tmp_path / "store", format="torch")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/README.md").write_text("x")
    refused(tmp_path / "folder", InvalidRequest, "no file of", tmp_path / "store")


def shards(folder: Path, save: Any, suffix: str, stem: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    where = {}
    for number in (1, 2, 3):
        name = f"{stem}-{number:05}-of-00003{suffix}"
        save({f"w{number}": torch.full((3,), float(number)), f"v{number}": torch.zeros(1)}, folder / name)
        where |= {f"w{number}": name, f"v{number}": name}
    return where


FOLDERS = (
    (save_file, ".safetensors", "model"),
    (torch.save, ".bin", "pytorch_model"),
)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(("save", "suffix", "stem"), FOLDERS, ids=["safetensors", "torch"])
def test_a_folder_as_transformers_has_it(tmp_path: Path, save: Any, suffix: str, stem: str, indexed: bool) -> None:
    folder = tmp_path / "model"
    where = shards(folder, save, suffix, stem)
    index = folder / f"{stem}{suffix}.index.json"
    if indexed:
        index.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": where}))
    (folder / "config.json").write_text("{}")
    report = tierload.import_state(folder, tmp_path / "store")
    assert (report.tensors, len(report.files), report.skipped) == (6, 3, (str(folder / "config.json"),))
    back = tierload.load(tmp_path / "store")
    assert {name: back[name].tolist() for name in ("w1", "w2", "w3")} == {"w1": [1] * 3, "w2": [2] * 3, "w3": [3] * 3}
    assert len(back) == 6


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(("save", "suffix", "stem"), FOLDERS, ids=["safetensors", "torch"])
def test_shards_that_do_not_fit_together(tmp_path: Path, save: Any, suffix: str, stem: str, indexed: bool) -> None:
    folder, store = tmp_path / "model", tmp_path / "store"
    where = shards(folder, save, suffix, stem)
    index = folder / f"{stem}{suffix}.index.json"
    if indexed:
        index.write_text(json.dumps({"weight_map": where | {"w9": where["w1"]}}))
        refused(folder, CorruptFile, "'w9'", store)
        index.write_text(json.dumps({"weight_map": where}))
    second = folder / where["w2"]
    save({"w1": torch.ones(3), "w2": torch.ones(3), "v2": torch.ones(1)}, second)
    refused(folder, CorruptFile, r"00002-of-00003.*'w1' is in another|00002.*w1", store)
    second.unlink()
    refused(folder, CorruptFile, "not there", store)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", ".", "sub/x.safetensors"])
def test_an_index_that_points_elsewhere(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    refused(folder, CorruptFile, "index", tmp_path / "store")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path / "model.safetensors.index.json", CorruptFile, "is no index", tmp_path / "store")


def test_several_files_are_entries_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")
    report = tierload.import_state(folder, tmp_path / "store", step=500)
    assert report.format == "safetensors and torch"
    other = torch.nn.Linear(3, 3)
    again = torch.optim.AdamW(other.parameters())
    tierload.load(tmp_path / "store", into={"model": other}, keys="model")
    again.load_state_dict(tierload.load(tmp_path / "store")["optimizer"])
    assert_alike(dict(other.state_dict()), dict(model.state_dict()))
    assert_alike(again.state_dict(), optimizer.state_dict())
    tierload.import_state([folder / "model.safetensors", folder / "optimizer.pt"], tmp_path / "named")
    assert tierload.load(tmp_path / "named").keys() == {"model", "optimizer"}


def test_the_same_model_or_name_twice(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    torch.save({"w": torch.ones(1)}, folder / "pytorch_model.bin")
    refused(folder, InvalidRequest, "twice", tmp_path / "store")
    torch.save({"w": torch.ones(1)}, folder / "model.pt")
    refused(folder, InvalidRequest, "'model'", tmp_path / "store")
    tierload.import_state(folder / "pytorch_model.bin", tmp_path / "store")


def test_one_bad_file_of_several(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "good.safetensors")
    (tmp_path / "bad.pt").write_bytes(b"x")
    tierload.save({"mine": 1}, tmp_path / "store", step=1)
    with pytest.raises(CorruptFile, match=re.escape("bad.pt")):
        tierload.import_state([tmp_path / "good.safetensors", tmp_path / "bad.pt"], tmp_path / "store")
    assert [commit.step for commit in tierload.open(tmp_path / "store").commits()] == [1]
    assert tierload.load(tmp_path / "store") == {"mine": 1}
    assert names(tmp_path) == ["bad.pt", "good.safetensors"]


def test_an_ordered_state_dict_keeps_its_versions(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    tierload.import_state(tmp_path / "a.pt", tmp_path / "store")
    back = tierload.load(tmp_path / "store")
    assert isinstance(back, collections.OrderedDict)
    assert back._metadata == model.state_dict()._metadata
