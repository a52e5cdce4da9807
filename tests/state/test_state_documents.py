"""States that ranks share: cut into units, written as documents, and read by any rank as what it saved."""

from __future__ import annotations

import collections
import ctypes
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from tierload.errors import CorruptStore
from tierload.state import RNG, cut, flatten, plan_load, read_documents, write_documents
from tierload.state.slots import chunk_places
from tierload.types import FlatState


def documents(states: list[Any], own: list[bool], per_rank: tuple[str, ...] = ()) -> list[bytes]:
    """What the shards of ranks say that have saved these states."""
    written = []
    for rank, state in enumerate(states):
        flat = flatten(state)
        whole = cut(flat, per_rank)
        assert len(whole.units) == len(own), [unit.key for unit in whole.units]
        shared = {n for unit, alone in zip(whole.units, own, strict=True) if not alone for n in unit.chunks}
        parts = dict.fromkeys(shared, ((0, -1, 0),)) if rank == 0 else None
        written.append(write_documents(whole, own, flat, parts, len(states)))
    return written


def loaded(states: list[Any], written: list[bytes], rank: int) -> Any:
    """The state as a rank reads it, with the bytes from the states by key."""
    seen = read_documents(written[0], written[rank] if rank else None, rank)
    plan = plan_load(seen.document, seen.chunks)
    flats = [flatten(state) for state in states]
    for chunk, pointer in zip(plan.destinations.chunks.tolist(), plan.destinations.pointers.tolist(), strict=True):
        tensor = seen.tensors[chunk]
        copy(flats[tensor.owner if tensor.owner >= 0 else 0], tensor.key, pointer)
    return plan.finish()


def copy(flat: FlatState, key: str, pointer: int) -> None:
    number = flat.chunks.keys_at(range(len(flat.chunks))).index(key)
    ctypes.memmove(pointer, int(flat.pointers[number]), int(flat.chunks.nbytes[number]))


def state_of(rank: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0), "b": torch.ones(2)},
        "step": 5,
        "loader": {"at": rank * 7, "seen": list(range(rank))},
        "rng": random.Random(rank),
        "array": np.arange(rank + 1),
    }


OWN = [False, False, False, True, True, True]


def test_units_are_tensors_and_the_largest_parts_without() -> None:
    whole = cut(flatten(state_of(1)), ())
    assert [unit.key for unit in whole.units] == ["model/w", "model/b", "step", "loader", "rng", "array"]
    assert [unit.is_values for unit in whole.units] == [False, False, True, True, True, True]


def test_a_state_without_tensors_is_cut_below_its_root() -> None:
    whole = cut(flatten({"a": {"b": 1, "c": [2]}, "d": 3}), ())
    assert [unit.key for unit in whole.units] == ["a", "d"]


def test_what_was_declared_is_one_unit_with_its_tensors() -> None:
    whole = cut(flatten(state_of(1)), ("model",))
    assert [(unit.key, unit.alone) for unit in whole.units[:2]] == [("model", True), ("step", False)]
    assert len(whole.units[0].chunks) == 2


@pytest.mark.parametrize("rank", range(3))
def test_each_rank_reads_its_own_values_beside_the_shared_ones(rank: int) -> None:
    states = [state_of(rank) for rank in range(3)]
    found = loaded(states, documents(states, OWN), rank)
    assert torch.equal(found["model"]["w"], torch.arange(6.0))
    assert found["step"] == 5
    assert found["loader"] == {"at": rank * 7, "seen": list(range(rank))}
    assert found["rng"].getstate() == random.Random(rank).getstate()
    assert found["array"].tolist() == list(range(rank + 1))


def test_own_keys_are_named() -> None:
    states = [state_of(rank) for rank in range(2)]
    assert read_documents(documents(states, OWN)[0], None, 0).own == ("loader", "rng", "array")


def referring(rank: int) -> dict[str, Any]:
    """Values that refer to one another across units, after own values of several sizes."""
    shared: list[Any] = [1]
    own: list[Any] = [[] for _ in range(rank)]
    inner: list[Any] = [rank]
    return {
        "own": {"lists": own, "inner": inner},
        "w": torch.ones(1),
        "first": {"shared": shared, "w": torch.ones(2)},
        "second": [shared, shared],
        "own_too": {"again": inner, "rank": rank},
    }


@pytest.mark.parametrize("rank", range(3))
def test_references_lead_to_the_same_objects_on_every_rank(rank: int) -> None:
    states = [referring(rank) for rank in range(3)]
    own = [unit.key.startswith("own") for unit in cut(flatten(states[0]), ()).units]
    found = loaded(states, documents(states, own), rank)
    assert found["second"][0] is found["second"][1] is found["first"]["shared"]
    assert found["own_too"]["again"] is found["own"]["inner"]
    assert found["own"]["inner"] == [rank]


def test_containers_of_all_kinds_are_put_together_again() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "pairs": {1: torch.ones(1), (2, "x"): 3},
        "odict": collections.OrderedDict(a=torch.ones(1)),
        "deque": collections.deque([torch.ones(1), 2]),
        "default": collections.defaultdict(list, {"k": [torch.ones(1)]}),
        "tuple": (torch.ones(1), None),
        "sparse": torch.eye(3).to_sparse(),
        "random": RNG(),
    }
    flat = flatten(state)
    whole = cut(flat, ())
    parts = {n: ((0, -1, 0),) for unit in whole.units for n in unit.chunks}
    written = write_documents(whole, [False] * len(whole.units), flat, parts, 1)
    assert loaded([state], [written], 0)["pairs"].keys() == state["pairs"].keys()
    again = json.loads(read_documents(written, None, 0).document)
    numbers = {n: at for at, n in enumerate(dict.fromkeys(n for unit in whole.units for n in unit.chunks))}
    first = json.loads(flat.document)
    for place in chunk_places(first["root"]):
        place["chunk"] = numbers[place["chunk"]]
    assert again == first


@pytest.mark.parametrize(
    "change",
    [
        lambda doc: doc.pop("own"),
        lambda doc: doc["tensors"][0].pop(),
        lambda doc: doc["tensors"][0].__setitem__(2, [-1]),
        lambda doc: doc["tensors"][0].__setitem__(3, [[0, -1]]),
        lambda doc: doc["tensors"][0].__setitem__(4, 7),
        lambda doc: doc["own"].pop(),
        lambda doc: doc["root"]["d"].__setitem__("loader", {"own": 9}),
        lambda doc: doc["root"]["d"].__setitem__("loader", {"list": 1, "two": 2}),
        lambda doc: doc["root"]["d"].__setitem__("loader", {"odict": 4}),
        lambda doc: doc.__setitem__("own", [{"ref": [5, 6]}, 1, 2]),
        lambda doc: doc.__setitem__("meshes", [[[2], [0, 0], []]]),
        lambda doc: doc.__setitem__("tensors", 3),
    ],
)
def test_a_damaged_document_is_refused(change: Any) -> None:
    document = json.loads(documents([state_of(0)], OWN)[0])
    change(document)
    with pytest.raises(CorruptStore):
        read_documents(json.dumps(document).encode(), None, 0)
