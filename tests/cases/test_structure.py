"""B59, B60 and B95: keys of any kind, values of any kind, and files that belong to a checkpoint."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

import tierload
from tests.cases.stores import let_go, stored_keys
from tests.state.alike import assert_alike
from tierload import KeyMismatch, UnsupportedValue


def loaded(path: Path, state: Any, **options: Any) -> Any:
    tierload.save(state, path)
    let_go(path)
    return tierload.load(path, **options)


# -- B59


def tensors(keys: list[Any]) -> dict[Any, torch.Tensor]:
    return {key: torch.full((5,), float(n)) for n, key in enumerate(keys)}


ODD_KEYS = ["a.b", "a/b", "", 1, "1", (1, 2), None, "名前", "x" * 5000, "..", "nul\0"]


def test_b59_keys_that_other_tools_confuse(store: Path) -> None:
    state = {"a": {"b": torch.full((5,), -1.0)}} | tensors(ODD_KEYS)
    found = loaded(store, state)
    assert_alike(found, state)
    assert [type(key) for key in found] == [type(key) for key in state]
    assert len(stored_keys(store)) == len(set(stored_keys(store))) == 12
    assert tierload.open(store).verify(full=True).ok
    target = {"a": {"b": torch.zeros(5)}} | {key: torch.zeros(5) for key in ODD_KEYS}
    tierload.load(store, into=target)
    assert_alike(target, state)


def test_b59_more_keys_of_this_kind(store: Path) -> None:
    keys = ["#1", "~", "~0", "~1", "/", "//", "#", "# 1", "\ud800", "\U0001f600", "é", "e\u0301", " ", "\n", "."]
    keys += [True, False, 1.5, -1, 2**70, b"1", ("1", 1), (1, (2, None)), frozenset({1, 2}), math.inf, -0.5]
    state = tensors(keys) | {"nested": {"a": tensors(keys)}, "list": [{1: torch.ones(2), "1": torch.zeros(2)}]}
    found = loaded(store, state)
    assert_alike(found, state)
    assert len(set(stored_keys(store))) == 2 * len(keys) + 2


def test_b59_single_keys_can_be_asked_for(store: Path) -> None:
    state = {"a": {"b": torch.ones(5)}} | tensors(ODD_KEYS)
    tierload.save(state, store)
    for name in stored_keys(store):
        pattern = name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")
        assert tierload.load(store, keys=pattern), name
    assert_alike(tierload.load(store, keys="#1"), {1: state[1]})
    assert_alike(tierload.load(store, keys="1"), {"1": state["1"]})
    assert_alike(tierload.load(store, keys="a/b"), {"a": {"b": state["a"]["b"]}})
    assert_alike(tierload.load(store, keys="a~1b"), {"a/b": state["a/b"]})


def test_b59_keys_that_cannot_be_kept_are_refused_by_name(store: Path) -> None:
    class Mine:
        pass

    for key in (Mine(), (1, Mine()), torch.ones(1)):
        with pytest.raises(UnsupportedValue, match="outer"):
            tierload.save({"outer": {key: 1}}, store)
    with pytest.raises(LookupError, match="nothing has been saved"):
        tierload.load(store)


# -- B60


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Config:
    width: int
    rates: list[float]
    inner: Config | None = None
    weight: torch.Tensor | None = None


class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = 2


TYPES = (Point, Config, Mode)


def values() -> dict[str, Any]:
    return {
        "epoch": 20,
        "ints": [0, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 + 1, -(2**63), -(2**63) - 1, 10**400],
        "floats": [0.1, -0.0, 0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 1.0, 1e22],
        "bools": [True, False],
        "none": None,
        "texts": ["", "a", "é\0\n\ud83d", "\U0001f600", "x" * 10_000, "\ud800", "\ud83d\ude00"],
        "bytes": [b"", b"\0\xff", b"y" * 100_000, bytearray(b"abc"), bytearray(b"z" * 100_000)],
        "complex": [1 + 2j, complex(math.nan, -0.0), complex(-math.inf, 0)],
        "tuple": (1, (2, [3]), ()),
        "named": Point(1, Point(2, torch.ones(3))),
        "set": {1, "a", (2, 3), None, 2.5},
        "frozenset": frozenset({b"x", frozenset({1})}),
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("hello"),
        "deque": collections.deque([1, torch.ones(1)], maxlen=5),
        "empty": [{}, [], (), set(), collections.OrderedDict(), collections.deque(), frozenset(), b"", ""],
        "data": Config(3, [0.1], Config(4, [], None, torch.zeros(2)), torch.ones(2)),
        "enum": [Mode.TRAIN, Mode.EVAL],
        "torch": [torch.Size([2, 0, 3]), torch.bfloat16, torch.complex64, torch.device("cuda:1"), torch.strided],
        "numpy": [np.float32(0.1), np.float64(math.nan), np.int64(-1), np.bool_(True), np.complex64(1j), np.str_("s")],
        "arrays": [
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.ones((3, 2), np.int8)),
            np.zeros((0, 3), np.uint16),
        ],
        "times": [
            datetime.datetime(2026, 7, 28, 12, 1, 2, 345678),
            datetime.datetime(2026, 7, 28, tzinfo=datetime.UTC),
            datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
            datetime.date(1, 1, 1),
            datetime.time(23, 59, 59, 999999),
            datetime.timedelta(-1, 5, 7),
        ],
        "paths": [Path("a/b"), Path("/"), Path()],
        "ranges": [range(3), range(10, 0, -2), slice(None, 5)],
        "order": {"z": 1, "a": 2, "m": 3},
    }


def test_b60_every_kind_of_value(store: Path) -> None:
    state = values()
    for name, value in state.items():
        try:
            found = loaded(store, {"value": value}, types=TYPES)
        except UnsupportedValue as error:
            pytest.fail(f"{name}: {error}")
        assert_alike(found, {"value": value}, name)
    assert_alike(loaded(store, state, types=TYPES), state)


def test_b60_no_template_is_needed(store: Path) -> None:
    found = loaded(store, {"epoch": 20, "model": {"w": torch.ones(3)}, "history": [1.5, 2]})
    assert found["epoch"] == 20
    assert type(found["epoch"]) is int
    assert type(found["history"][1]) is int


def test_b60_into_a_template_values_are_restored_too(store: Path) -> None:
    state = {"epoch": 20, "lr": 0.1, "name": "x", "done": True, "history": [1, 2], "w": torch.ones(3), "nothing": None}
    tierload.save(state, store)
    target = {"epoch": 0, "lr": 0.0, "name": "", "done": False, "history": [], "w": torch.zeros(3), "nothing": None}
    tierload.load(store, into=target)
    assert_alike(target, state)


def test_b60_types_that_are_not_given_become_plain(store: Path) -> None:
    """Nothing is imported by a name in a store; the values are all there."""
    found = loaded(store, {"p": Point(1, 2), "c": Config(3, [0.1]), "m": Mode.EVAL})
    assert tuple(found["p"]) == (1, 2)
    assert found["c"] == {"width": 3, "rates": [0.1], "inner": None, "weight": None}
    assert found["m"] == 2
    assert_alike(tierload.load(store, types=TYPES), {"p": Point(1, 2), "c": Config(3, [0.1]), "m": Mode.EVAL})


@pytest.mark.parametrize(
    "value",
    [decimal.Decimal("1.5"), object(), pathlib.PureWindowsPath("c:"), lambda: 1, Path, (i for i in ()), np.array([{}])],
)
def test_b60_everything_else_is_refused_by_name(store: Path, value: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"'trainer'.*'extra'") as found:
        tierload.save({"trainer": {"extra": [1, value]}}, store)
    assert type(value).__name__ in str(found.value) or "object" in str(found.value)


def test_b60_the_same_object_twice_and_cycles(store: Path) -> None:
    shared = [1, 2]
    state: dict[str, Any] = {"a": shared, "b": {"c": shared}, "t": (shared,)}
    state["self"] = state
    found = loaded(store, state)
    assert found["a"] is found["b"]["c"] is found["t"][0]
    assert found["self"] is found


# -- B95: the state of the trainer and the tokenizer's files are part of the commit


def test_b95_files_are_part_of_the_commit(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    (folder / "sub").mkdir(parents=True)
    (folder / "vocab.json").write_text('{"a": 1}')
    (folder / "sub" / "merges.txt").write_bytes(bytes(range(256)) * 300)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    state = {"w": torch.ones(2), "tokenizer": tierload.Folder(folder), "args": tierload.File(folder / "vocab.json")}
    tierload.save(state, store, step=1)
    (folder / "vocab.json").write_text("{}")
    let_go(store)
    found = tierload.load(store)
    found["tokenizer"].write_to(tmp_path / "back")
    found["args"].write_to(tmp_path / "args")
    assert (tmp_path / "back" / "vocab.json").read_text() == '{"a": 1}'
    assert (tmp_path / "back" / "sub" / "merges.txt").read_bytes() == bytes(range(256)) * 300
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "args" / "vocab.json").read_text() == '{"a": 1}'
    assert tierload.save(state | {"w": torch.ones(2)}, store, step=2).commit.step == 2


def test_b95_a_missing_piece_is_named(store: Path, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedValue, OSError), match="nowhere"):
        tierload.save({"tokenizer": tierload.Folder(tmp_path / "nowhere")}, store)
    tierload.save({"model": {"w": torch.ones(2)}}, store)
    target = {"model": {"w": torch.zeros(2)}, "trainer": {"global_step": 0}, "rng": tierload.RNG()}
    with pytest.raises(KeyMismatch, match="global_step") as found:
        tierload.load(store, into=target)
    assert "trainer/global_step" in found.value.missing
    assert "rng" in found.value.missing
