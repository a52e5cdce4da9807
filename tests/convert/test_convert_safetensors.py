"""Out to safetensors and back: dtypes, ties, shapes, layouts, names, values, texts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

import tierload
from tests.convert.convert_support import entry, export, filled, raw_file
from tests.state.alike import assert_alike, assert_tensor, raw
from tierload.state.dtypes import BY_NAME

SHAPES = ((), (0,), (3,), (2, 4), (0, 5))
SHELLS = {name for name, row in BY_NAME.items() if row.is_shell}
REFUSED = {"complex32", "complex128", *SHELLS}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_dtype_and_shape_comes_back_or_is_left_out(tmp_path: Path, name: str) -> None:
    state = {str(shape): filled(name, shape) for shape in SHAPES}
    report = export(state, tmp_path / "a.safetensors")
    refused = set(state) if name in REFUSED else {"()"} if name == "float4_e2m1fn_x2" else set()
    assert {key for key, _ in report.left_out} == refused
    assert all(name in why for _, why in report.left_out)
    kept = {key: tensor for key, tensor in state.items() if key not in refused}
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == kept.keys()
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back")
    back = tierload.load(tmp_path / "back")
    for key, tensor in kept.items():
        assert_tensor(loaded[key], tensor)
        assert_tensor(back[key], tensor)


def test_a_tie_is_stored_once_and_is_one_tensor_again(tmp_path: Path) -> None:
    embed = torch.randn(64, 32)
    state = {"embed": embed, "head": embed, "turned": embed.t(), "empty": torch.zeros(0), "nothing": torch.zeros(0)}
    report = export(state, tmp_path / "a.safetensors")
    assert report.ties == {"head": "embed"}
    assert [key for key, _ in report.changed] == ["turned", "turned"]  # a view, in another order
    assert load_file(tmp_path / "a.safetensors").keys() == {"embed", "turned", "empty", "nothing"}
    assert (tmp_path / "a.safetensors").stat().st_size < 2 * embed.nbytes + 2000
    imported = tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back")
    assert imported.ties == {"head": "embed"}
    back = tierload.load(tmp_path / "back")
    assert back["head"].data_ptr() == back["embed"].data_ptr()
    assert {key: raw(tensor) for key, tensor in back.items()} == {key: raw(tensor) for key, tensor in state.items()}


def test_a_tied_model_comes_back_tied(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20, bias=False))
        made[1].weight = made[0].weight
        return made

    first, second = model(), model()
    report = export({"model": first}, tmp_path / "a.safetensors", root="model")
    assert report.ties == {"1.weight": "0.weight"}  # the first in the order of the model, as transformers expects
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back")
    tierload.load(tmp_path / "back", into=second)
    assert torch.equal(second[0].weight, first[0].weight)
    assert second[0].weight is second[1].weight


def test_layouts_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(120.0)
    state = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.randn(5, 7).t(),
        "stepped": base[10:90:3],
        "expanded": torch.tensor([1.0, 2.0]).expand(4, 2),
        "single": torch.arange(12.0)[5::9],
        "single rows": torch.arange(12.0).reshape(3, 4)[1:2, ::3].as_strided((1, 2, 1), (7, 3, 0)),
        "negated": torch._neg_view(torch.randn(4)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    report = export(state, tmp_path / "a.safetensors")
    assert not report.left_out
    assert {key for key, _ in report.changed} >= {"channels_last", "turned"}
    loaded = load_file(tmp_path / "a.safetensors")
    assert {key: raw(loaded[key]) for key in state} == {key: raw(tensor) for key, tensor in state.items()}


def test_names(tmp_path: Path) -> None:
    texts = ["weiß.重み", "a/b", "~", "#0", "x y\n\x00", "", "🙂", "__metadata__ "]
    state: dict[str, torch.Tensor] = {name: torch.tensor(number) for number, name in enumerate(texts)}
    report = export(state, tmp_path / "a.safetensors")
    assert not report.left_out
    assert {name: int(value) for name, value in load_file(tmp_path / "a.safetensors").items()} == {
        name: number for number, name in enumerate(texts)
    }
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back")
    assert tierload.load(tmp_path / "back").keys() == state.keys()


def test_names_that_no_file_has_are_left_out(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "__metadata__": torch.ones(2) * 2, "\ud800": torch.ones(2) * 3}
    report = export(state, tmp_path / "a.safetensors")
    assert [key for key, _ in report.left_out] == ["__metadata__", "\ud800"]
    assert load_file(tmp_path / "a.safetensors").keys() == {"w"}


def test_nested_states_are_flat_and_collisions_are_left_out(tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(1)}, "list": [torch.ones(2), {"c": torch.ones(3)}], "a/b": torch.zeros(9)}
    report = export(state, tmp_path / "a.safetensors")
    assert {name: len(value) for name, value in load_file(tmp_path / "a.safetensors").items()} == {
        "a/b": 1,
        "list/#0": 2,
        "list/#1/c": 3,
    }
    ((key, why),) = report.left_out
    assert key == "a~1b"
    assert "'a/b'" in why


def test_values_are_kept_in_the_texts(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "step": 100,
        "best": float("-inf"),
        "nothing": None,
        "names": ["a", "\ud800"],
        "empty": {},
        "shape": torch.Size([1, 2]),
        "data": b"\x00\xff",
    }
    report = export(state, tmp_path / "a.safetensors")
    assert not report.left_out
    assert report.values == 8  # the list has two
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back")
    back = dict(tierload.load(tmp_path / "back"))
    names = [back.pop("names/#0"), back.pop("names/#1")]
    assert names == state.pop("names")
    assert_alike({key: back[key] for key in state}, state)


def test_what_is_too_large_or_no_value_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}" * 10)
    state = {
        "w": torch.ones(2),
        "blob": b"x" * 5000,
        "file": tierload.File(tmp_path / "tokenizer.json"),
        "texts": np.array(["a", "b"]),
        "array": np.arange(6.0).reshape(2, 3),
        "complex": np.zeros(3, np.complex128),
    }
    report = export(state, tmp_path / "a.safetensors")
    assert {key for key, _ in report.left_out} == {"blob", "file", "texts", "complex"}
    assert report.changed == (("array", "was a NumPy array, is a tensor"),)
    assert load_file(tmp_path / "a.safetensors")["array"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_container_that_holds_itself(tmp_path: Path) -> None:
    state: dict[str, object] = {"w": torch.ones(2), "list": [1]}
    state["list"].append(state["list"])  # type: ignore[attr-defined]
    report = export(state, tmp_path / "a.safetensors")
    assert [key for key, _ in report.left_out] == ["list/#1"]
    assert report.values == 1


def test_texts_of_a_file_come_back_on_export(tmp_path: Path) -> None:
    texts = {"format": "pt", "license": "Äpache", "z": "1", "a": "2"}
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata=texts)
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "store")
    assert tierload.load(tmp_path / "store")._metadata == {"__metadata__": texts}
    tierload.export_state(tmp_path / "store", tmp_path / "b.safetensors")
    with safetensors.safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert file.metadata() == texts


def test_versions_of_modules_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    export(model, tmp_path / "a.safetensors")
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back")
    back = tierload.load(tmp_path / "back")
    assert isinstance(back, OrderedDict)
    assert back._metadata["1"] == {"version": 2}
    model.load_state_dict(back)


def test_a_state_dict_file_resumes_a_model(tmp_path: Path) -> None:
    model, other = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    report = tierload.import_state(tmp_path / "model.safetensors", tmp_path / "store", step=3, tags=["base"], note="hi")
    assert (report.commit.step, report.commit.tags, report.commit.note) == (3, ("base",), "hi")
    assert (report.tensors, report.bytes) == (7, sum(tensor.nbytes for tensor in model.state_dict().values()))
    tierload.load(tmp_path / "store", tag="base", into=other)
    assert_alike(other.state_dict(), model.state_dict())


def test_a_file_whose_tensors_lie_at_odd_places(tmp_path: Path) -> None:
    data = bytes(range(1, 28))
    header = {
        "a": entry("U8", [3], 0, 3),
        "b": entry("F32", [2], 3, 11),
        "c": entry("BF16", [1], 11, 13),
        "d": entry("I64", [1], 13, 21),
        "e": entry("U8", [6], 21, 27),
    }
    path = raw_file(tmp_path / "odd.safetensors", header, data)
    tierload.import_state(path, tmp_path / "store")
    back = tierload.load(tmp_path / "store")
    assert b"".join(raw(back[name]) for name in "abcde") == data


def test_the_same_commit_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = {f"text {number}": str(number) for number in range(16)}
    save_file({"w": torch.ones(2), "v": torch.zeros(3)}, tmp_path / "a.safetensors", metadata=texts)
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "store")
    code = "import sys, tierload; tierload.export_state(sys.argv[1], sys.argv[2])"
    for suffix in (".safetensors", ".pt"):
        made = set()
        for seed in range(3):
            to = tmp_path / f"{seed}{suffix}"
            command = [sys.executable, "-c", code, str(tmp_path / "store"), str(to)]
            subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": str(seed)}, check=True)
            made.add(to.read_bytes())
        assert len(made) == 1


def test_ten_thousand_small_tensors(tmp_path: Path) -> None:
    state = {f"layer.{number}.scale": torch.tensor(number) for number in range(10_000)}
    assert export(state, tmp_path / "a.safetensors").tensors == 10_000
    assert tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back").tensors == 10_000
    assert tierload.load(tmp_path / "back")["layer.9999.scale"] == 9999


def test_an_empty_state(tmp_path: Path) -> None:
    export({}, tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors") == {}
    tierload.import_state(tmp_path / "a.safetensors", tmp_path / "back")
    assert dict(tierload.load(tmp_path / "back")) == {}
