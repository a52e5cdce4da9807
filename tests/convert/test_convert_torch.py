"""Out to files of torch.save and back."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import pathlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import tierload
from tests.convert.convert_support import export, filled
from tests.state.alike import assert_alike
from tierload import api
from tierload.convert import importing
from tierload.state.dtypes import BY_NAME

SHAPES = ((), (0,), (3,), (2, 4), (0, 5))


def load(path: Path) -> object:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_dtype_and_shape(tmp_path: Path, name: str) -> None:
    state = {str(shape): filled(name, shape) for shape in SHAPES}
    report = export(state, tmp_path / "a.pt")
    if re.fullmatch(r"u?int[1-7]", name):
        assert {key for key, _ in report.left_out} == set(state)
        assert load(tmp_path / "a.pt") == {}
        return
    assert (report.left_out, report.changed, report.tensors) == ((), (), 5)
    assert_alike(load(tmp_path / "a.pt"), state)
    tierload.import_state(tmp_path / "a.pt", tmp_path / "back")
    assert_alike(tierload.load(tmp_path / "back"), state)


def test_a_whole_training_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "epoch": 3, "seen": {1, 2}, ("a", 1): [None, (1.5, "x")]}
    report = export(state, tmp_path / "a.pt")
    assert not report.left_out
    assert_alike(load(tmp_path / "a.pt"), tierload.load(tmp_path / "a.pt.store"))

    tierload.import_state(tmp_path / "a.pt", tmp_path / "back")
    assert_alike(tierload.load(tmp_path / "back"), tierload.load(tmp_path / "a.pt.store"))
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    tierload.load(tmp_path / "back", into={"model": other}, keys="model")
    assert_alike(dict(other.state_dict()), {name: value.contiguous() for name, value in model.state_dict().items()})


def test_memory_that_is_shared_stays_shared(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    state = {"w": weight, "tied": weight, "turned": weight.t(), "row": weight[2], "other": torch.randn(6, 4)}
    report = export(state, tmp_path / "a.pt")
    assert report.ties == {"tied": "w"}
    assert (tmp_path / "a.pt").stat().st_size < 3 * weight.nbytes + 4000
    assert tierload.import_state(tmp_path / "a.pt", tmp_path / "back").ties == {"tied": "w"}
    for back in (load(tmp_path / "a.pt"), tierload.load(tmp_path / "back")):
        assert_alike(back, state)
        back["w"].zero_()
        assert not any(back[key].any() for key in ("tied", "turned", "row"))
        assert back["other"].all()


def test_layouts_and_flags(tmp_path: Path) -> None:
    state = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.randn(5, 7).t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(4, 2),
        "single": torch.arange(12.0)[5::9],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "learned": torch.randn(3, requires_grad=True),
    }
    export(state, tmp_path / "a.pt")
    assert_alike(load(tmp_path / "a.pt"), state)
    tierload.import_state(tmp_path / "a.pt", tmp_path / "back")
    assert_alike(tierload.load(tmp_path / "back"), state)


def test_the_same_container_in_two_places_and_one_that_holds_itself(tmp_path: Path) -> None:
    shared = {"w": torch.ones(2)}
    state: dict[str, object] = {"a": shared, "b": shared, "round": [1]}
    state["round"].append(state["round"])  # type: ignore[attr-defined]
    export(state, tmp_path / "a.pt")
    tierload.import_state(tmp_path / "a.pt", tmp_path / "back")
    for back in (load(tmp_path / "a.pt"), tierload.load(tmp_path / "back")):
        assert back["a"] is back["b"]
        assert back["round"][1] is back["round"]


@dataclasses.dataclass
class Config:
    """A type of a user."""

    width: int
    weight: torch.Tensor


def test_what_torch_refuses_is_changed_or_left_out(tmp_path: Path) -> None:
    state = {
        "deque": collections.deque([torch.ones(1)]),
        "default": collections.defaultdict(list, a=torch.ones(2)),
        "number": np.float32(1.5),
        "array": np.arange(3),
        "config": Config(3, torch.ones(4)),
        "date": datetime.date(2026, 1, 1),
        "path": pathlib.Path("x"),
        "list": [1, frozenset([2]), 3],
        "keys": {frozenset([1]): torch.ones(5), 1: "one"},
        "set": {frozenset([1])},
        "texts": np.array(["a", "b"]),
        "nothing": b"",
        "empty": bytearray(),
    }
    report = export(state, tmp_path / "a.pt")
    assert [key for key, _ in report.left_out] == [
        "date",
        "path",
        "list/#1",
        'keys/#{"frozenset":[1]}',
        "set",
        "texts",
        "nothing",
    ]
    assert [key for key, _ in report.changed] == ["deque", "default", "number", "array"]
    expected = {
        "deque": [torch.ones(1)],
        "default": {"a": torch.ones(2)},
        "number": 1.5,
        "array": torch.arange(3),
        "config": {"width": 3, "weight": torch.ones(4)},
        "list": [1, None, 3],
        "keys": {1: "one"},
        "empty": bytearray(),
    }
    assert_alike(load(tmp_path / "a.pt"), expected)


def test_a_state_that_is_too_deep_for_torch(tmp_path: Path) -> None:
    state: list[object] = []
    for _ in range(480):
        state = [state]
    with pytest.raises(tierload.UnsupportedValue, match="deeper"):
        export(state, tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_an_old_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    state = {"w": torch.randn(3), "step": 2}
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    tierload.import_state(tmp_path / "old.pth", tmp_path / "back")
    assert_alike(tierload.load(tmp_path / "back"), state)


@pytest.mark.parametrize(
    "state", [torch.arange(5), [torch.ones(1), torch.ones(2)], 3], ids=["tensor", "list", "number"]
)
def test_the_state_need_not_be_a_dict(tmp_path: Path, state: object) -> None:
    export(state, tmp_path / "a.pt")
    tierload.import_state(tmp_path / "a.pt", tmp_path / "back")
    assert_alike(tierload.load(tmp_path / "back"), state)


def test_a_state_that_is_compared_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one larger than memory is: keys with characters of patterns, references, ties across the parts."""
    monkeypatch.setattr(importing, "_COMPARED_BYTES", 16)
    shared = {"x": torch.ones(3), "y": torch.zeros(4)}
    tied = torch.arange(5)
    state: dict[str, object] = {"a": shared, "b": shared, "[c*]?": tied, "tied": tied, "none": None, "round": [1]}
    state["round"].append(state["round"])  # type: ignore[attr-defined]
    state |= {"list": [{}, (), [torch.ones(1), 3]], "c": torch.ones(2), "a/x": torch.ones(9)}
    torch.save(state, tmp_path / "a.pt")
    assert tierload.import_state(tmp_path / "a.pt", tmp_path / "back").tensors == 6
    assert_alike(tierload.load(tmp_path / "back"), state)


@pytest.mark.parametrize("limit", [16, 1 << 28])
@pytest.mark.parametrize("change", [torch.tensor([7.0, 1.0]), torch.ones(3), torch.ones(2).half(), None, 1.5])
def test_what_the_store_holds_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: object, limit: int
) -> None:
    monkeypatch.setattr(importing, "_COMPARED_BYTES", limit)
    torch.save({"u": torch.zeros(4), "w": torch.ones(2), "v": torch.zeros(4)}, tmp_path / "a.pt")
    save = api.save
    monkeypatch.setattr(api, "save", lambda state, *rest, **options: save(state | {"w": change}, *rest, **options))
    with pytest.raises(tierload.CorruptStore, match=r"key 'w'.*rollback"):
        tierload.import_state(tmp_path / "a.pt", tmp_path / "back")
