"""What a save or a load keeps alive, and for how long; and that nothing adds up over many of them."""

from __future__ import annotations

import collections
import ctypes
import gc
import resource
import weakref

import pytest
import torch
from fake_engine import bind, load, save
from torch import nn

from tierload.errors import KeyMismatch, UnsupportedValue
from tierload.state import flatten, plan_bind, plan_load


class Bag(dict):
    """A dict that can be watched."""


class Thing:
    """An object with a state, of values that can be watched."""

    def __init__(self, error: bool = False) -> None:
        self.tensor = torch.ones(10)
        self.error = error

    def state_dict(self):
        if self.error:
            raise RuntimeError("no state")
        return {"tensor": self.tensor, "text": "x"}

    def load_state_dict(self, state) -> None:
        self.tensor = state["tensor"]


def state_and_watches(error: bool = False) -> tuple[dict, list[weakref.ref]]:
    thing, module = Thing(error), nn.Linear(3, 3)
    base = torch.ones(100)
    values = [
        torch.ones(3),
        base,
        base[5:],
        base[::7],
        module,
        module.weight,
        thing,
        torch.ones(2, requires_grad=True) * 2,
    ]
    state = {
        "plain": [values[0], (values[0],)],
        "tied": collections.OrderedDict(a=base, b=values[2], c=values[3]),
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        "graph": values[-1],
        "bytes": bytearray(10_000),
        3: {"inside": thing},
    }
    return state, [weakref.ref(value) for value in values]


def alive(watches: list[weakref.ref]) -> list[object]:
    return [watch() for watch in watches if watch() is not None]


@pytest.fixture
def no_collection():
    """Whatever dies here dies without a collection of cycles, as a user who has just enough memory needs it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_flat_state_keeps_memory_and_its_outline_does_not():
    state, watches = state_and_watches()
    flat = flatten(state)
    pointers, keys = flat.pointers, {info.key: info for info in flat.chunks.infos()}
    address = state["plain"][0].data_ptr()
    del state
    gc.collect()
    assert int(pointers[keys["plain/#0"].number]) == address
    assert watches[0]() is not None, "the memory that pointers name"
    assert watches[6]() is None, "an object gave its state, and nobody needs it"
    assert watches[-1]() is None, "no graph is kept alive"
    outline = flat.outline
    del flat
    gc.collect()
    assert alive(watches) == []
    again = flatten(state_and_watches()[0], like=outline)
    assert again.outline is outline
    del again
    gc.collect()


def test_nothing_waits_for_a_collection_after_a_save(no_collection):
    state, watches = state_and_watches()
    flat = flatten(state)
    del state["optimizer"]  # torch's own hooks are in cycles
    tensors = [watch for watch in watches if isinstance(watch(), torch.Tensor)]
    del state, flat
    assert [tensor.shape for tensor in alive(tensors) if not isinstance(tensor, nn.Parameter)] == []


@pytest.mark.parametrize("error", ["object", "value"])
def test_nothing_is_kept_after_a_save_that_failed(error):
    state, watches = state_and_watches(error == "object")
    if error == "value":
        state["bad"] = object()
    with pytest.raises((RuntimeError, UnsupportedValue)):
        flatten(state)
    del state
    gc.collect()
    assert alive(watches) == []


def test_a_loaded_state_lives_no_longer_than_the_user_holds_it(no_collection):
    saved = save({"a": torch.ones(3), "b": [torch.ones(3), {"c": torch.ones(4)}], "d": torch.ones(2, 2).t()})
    loaded = load(saved)
    watches = [weakref.ref(one) for one in (loaded["a"], *loaded["b"][:1], loaded["b"][1]["c"], loaded["d"])]
    del loaded
    assert alive(watches) == []


def test_a_target_lives_no_longer_than_the_user_holds_it(no_collection):
    saved = save({"a": torch.ones(3), "b": {"c": torch.ones(4)}, "d": torch.ones(2, 2).t(), "e": 5})
    into = {"a": torch.zeros(3), "b": {"c": torch.zeros(4)}, "d": torch.zeros(2, 2), "e": 4}
    watches = [weakref.ref(one) for one in (into["a"], into["b"]["c"], into["d"])]
    bind(saved, into)
    del into
    assert alive(watches) == []


def test_nothing_is_kept_after_a_load_that_failed():
    saved = save({"a": torch.ones(3), "b": torch.ones(4)})
    into = {"a": torch.zeros(3), "b": torch.zeros(5)}
    watches = [weakref.ref(one) for one in into.values()]
    with pytest.raises(KeyMismatch):
        bind(saved, into)
    plan = plan_bind(saved.document, saved.chunks, into, strict=False)
    del into
    gc.collect()
    assert len(alive(watches)) >= 1, "a plan keeps what will be filled"
    del plan
    gc.collect()
    assert alive(watches) == []


def test_destinations_keep_their_memory():
    """The engine reads into addresses: what they name lives as long as they do, whatever becomes of the plan."""
    saved = save({"a": torch.arange(1000.0), "b": {"c": torch.arange(4.0)}, "e": bytes(5000)})
    spots = plan_load(saved.document, saved.chunks).destinations
    gc.collect()
    assert len(spots) == 3
    others = [torch.zeros(1000) for _ in range(50)]  # they would be given memory that is free
    for chunk, pointer in zip(spots.chunks.tolist(), spots.pointers.tolist(), strict=True):
        ctypes.memset(pointer, 255, len(saved.data[chunk]))
    assert not any(other.any() for other in others)


def tensors_alive() -> int:
    gc.collect()
    return sum(type(one) in (torch.Tensor, nn.Parameter) for one in gc.get_objects())


@pytest.mark.parametrize("act", ["flatten", "like", "refused", "load", "bind", "bind refused"])
def test_nothing_adds_up(act):
    state, _ = state_and_watches()
    into, _ = state_and_watches()
    saved = save(state)
    outline = flatten(state).outline
    refused = {**state, "bad": object()}
    wrong = {**into, "plain": [torch.zeros(9), (torch.zeros(3),)]}

    def once() -> None:
        if act == "flatten":
            flatten(state)
        elif act == "like":
            flatten(state, like=outline)
        elif act == "refused":
            with pytest.raises(UnsupportedValue):
                flatten(refused)
        elif act == "load":
            load(saved)
        elif act == "bind":
            bind(saved, into)
        else:
            with pytest.raises(KeyMismatch):
                bind(saved, wrong)

    for _ in range(20):
        once()
    before, objects = tensors_alive(), len(gc.get_objects())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000 if act in ("flatten", "like", "load") else 300):
        once()
    assert tensors_alive() <= before
    assert len(gc.get_objects()) < objects + 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 60_000, "KiB"
