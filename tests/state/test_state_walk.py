"""Saving: a state is stored the same whichever way its values go, and whatever the objects in it do meanwhile."""

from __future__ import annotations

import collections

import hypothesis.strategies as st
import pytest
import torch
from alike import assert_alike
from fake_engine import bind, load, round_trip, save, stored
from hypothesis import given, settings
from two_ways import INTEGERS, TEXTS, Maker, facts_of, outcome, portrait, python_way

from tierload.errors import UnsupportedValue
from tierload.state import flatten

ones = torch.ones


def both(state: object) -> object:
    """What is stored of a state, or why it is refused: the same natively and by Python alone."""
    native = outcome(lambda: facts_of(flatten(state)))
    with python_way():
        python = outcome(lambda: facts_of(flatten(state)))
    assert native == python
    return native


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_any_state_is_stored_the_same_either_way(seed):
    state = Maker(seed).state()
    if not isinstance(both(state), dict):
        return
    saved = save(state)
    loaded = load(saved)
    with python_way():
        assert portrait(load(saved)) == portrait(loaded)


@pytest.mark.parametrize(
    "state",
    [
        dict.fromkeys(TEXTS, 1),
        {text: ones(1) for text in TEXTS},
        {number: ones(1) for number in INTEGERS},
        dict(zip(INTEGERS, INTEGERS, strict=True)),
        {1: ones(1), "1": ones(2), 2: ones(3), "2": ones(4), 1.5: ones(1), "1.5": ones(1)},
        {True: ones(1), "True": ones(2), None: ones(3), "None": ones(4), False: 1, "": 2},
        {0: ones(1), "#0": ones(2), "~0": ones(3), "~": ones(4), "a": {"b": ones(5)}, "a/b": ones(6), "a~1b": ones(7)},
        {(1, 2): ones(1), "(1, 2)": ones(2), (): ones(1), ("x", (None,)): ones(2), b"x": ones(3), "b'x'": 1},
        [-0.0, 0.0, float("nan"), float("inf"), 5e-324, 1e16, 1e22, 123456789.123456789, 1.7976931348623157e308],
        [True, 1, 1.0, "1", None, "null", "true", [], {}, (), "", [[]], [()], {"": {}}],
        [*TEXTS, *(one + other for one in TEXTS for other in TEXTS)],
        {
            "x" * before + odd + "x" * after: [ones(1)]
            for odd in '"\\\x7f\x1f ~}!#/a\x80é\U0001f600'
            for before in range(18)
            for after in (0, 1, 7, 8, 9)
        },
    ],
    ids=lambda state: type(state).__name__,
)
def test_keys_and_scalars_at_their_limits(state):
    assert isinstance(both(state), dict)
    assert_alike(round_trip(state), state)


def test_an_ordered_dict_keeps_its_own_order():
    state = collections.OrderedDict((name, ones(1) * number) for number, name in enumerate("abcd"))
    state.move_to_end("a")
    state.move_to_end("c", last=False)
    assert isinstance(both(state), dict)
    assert list(round_trip(state)) == ["c", "b", "d", "a"]
    state[7] = state.pop("b")
    state._metadata = {"": {"version": state["a"]}}
    assert isinstance(both(state), dict)
    loaded = round_trip(state)
    assert list(loaded) == ["c", "d", "a", 7]
    assert loaded._metadata[""]["version"] is loaded["a"]


def test_one_container_in_many_places():
    shared, named, empty = [ones(2)], {"x": ones(1)}, {}
    ordered = collections.OrderedDict(a=named)
    ordered._metadata = named
    state = {"a": shared, "b": (shared, named), 3: shared, "o": ordered, "again": ordered, "e": [empty, empty, {}]}
    state["state"] = state
    state["d"] = collections.defaultdict(list, {"x": shared, "y": state})
    assert isinstance(both(state), dict)
    assert portrait(round_trip(state)) == portrait(state)


def test_ties_of_tensors_with_a_graph():
    """That they want a gradient is kept; the graph that they came out of is not."""
    result = ones(2, 3, requires_grad=True) * 2
    for state in ({"a": result, "b": result}, {"a": result, "b": result[0]}, {"a": result, "b": result.detach()}):
        assert isinstance(both(state), dict)
        loaded = round_trip(state)
        assert loaded["a"].requires_grad
        assert loaded["b"].requires_grad == state["b"].requires_grad


class Holder:
    """An object with a state: what ``give`` gives."""

    def __init__(self, give) -> None:
        self.give = give

    def state_dict(self):
        return self.give()

    def load_state_dict(self, state) -> None:
        self.state = state


def deep(levels: int, inner: object, wrap) -> object:
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def state_dict_of(inner: object) -> collections.OrderedDict:
    ordered = collections.OrderedDict(a=inner)
    ordered._metadata = "of one level"
    return ordered


WRAPS = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "map": lambda inner: {1: inner},
    "odict": lambda inner: collections.OrderedDict(a=inner),
    "state dict": state_dict_of,
    "ddict": lambda inner: collections.defaultdict(None, a=inner),
    "object": lambda inner: Holder(lambda: inner),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("leaf", [1, "é", ones(2), torch.zeros(0), []], ids=["int", "text", "tensor", "empty", "list"])
def test_nesting_is_allowed_to_the_same_depth_for_all(wrap, leaf):
    """Whatever may be saved may be loaded, by any way; and what is too deep is refused when it is saved."""
    holds = isinstance(leaf, (list, torch.Tensor))  # it is a level of its own
    for levels in (498, 499, 500, 501, 502):
        state = deep(levels, leaf, wrap)
        result = both(state)
        if levels + holds > 501:
            assert "deeper than 500 levels" in result
            continue
        saved = save(state)
        loaded = load(saved)
        with python_way():
            assert portrait(load(saved)) == portrait(loaded)
        load(saved, keys=["*"])


@pytest.mark.parametrize("dims", [64, 65, 255, 256, 257, 300])
def test_many_dimensions(dims):
    state = {"a": ones([1] * dims), "b": ones(2)}
    result = both(state)
    assert isinstance(result, dict) == (dims <= 255)
    if dims <= 255:
        assert round_trip(state)["a"].dim() == dims


def test_memory_that_has_been_freed_is_refused():
    """As some frameworks free parameters between steps."""
    freed = ones(1000)
    turned = freed.view(10, 100).t()
    freed.untyped_storage().resize_(0)
    for state in ({"a": freed}, {"a": ones(1), "b": [turned]}):
        assert "has been freed" in both(state)
    saved = save({"a": ones(1000)})
    with pytest.raises(UnsupportedValue, match="has been freed"):
        bind(saved, {"a": freed})


def test_a_negative_view_of_integers():
    """Of no public function, but torch allows it."""
    state = {"a": torch._neg_view(torch.arange(3))}
    assert isinstance(both(state), dict)
    assert round_trip(state)["a"].tolist() == [0, -1, -2]


# ---- What an object does to the state while that is written ---------------------------------------------------------
def changes(change) -> dict:
    """A dict that an object in it changes when it is asked for its state."""
    state: dict = {"before": [1, 2]}

    def give():
        change(state)
        return {"x": ones(1)}

    state |= {"object": Holder(give), "after": ones(2), "last": 1}
    return state


def replace(state: dict, old: object, new: object, value: object = 5) -> None:
    del state[old]
    state[new] = value


CHANGES = {
    "grows": lambda state: state.__setitem__("more", 1),
    "shrinks": lambda state: state.pop("last"),
    "is empty": dict.clear,
    "int for text": lambda state: replace(state, "last", 7),
    "tuple for text": lambda state: replace(state, "last", (1, 2)),
    "large int for text": lambda state: replace(state, "last", 2**200),
    "wide text for text": lambda state: replace(state, "last", "\U0001f600" * 50),
    "latin text for text": lambda state: replace(state, "last", 'é"\\'),
    "an earlier one again": lambda state: replace(state, "before", "before"),
    "all others": lambda state: [replace(state, key, (key,), [key] * 99) for key in list(state)],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_dict_that_changes_while_it_is_saved_is_refused(change):
    with pytest.raises((ValueError, UnsupportedValue), match="changed"):
        flatten(changes(change))
    inside = {"outer": [changes(change)]}
    with pytest.raises((ValueError, UnsupportedValue), match="changed"):
        flatten(inside)


def test_values_that_change_while_they_are_saved_are_taken_as_they_are_met():
    state = changes(lambda state: state.update(before=ones(9), after=ones(3), last=[ones(4)]))
    loaded = load(save(state))
    assert loaded["before"] == [1, 2]
    assert torch.equal(loaded["after"], ones(3))
    assert torch.equal(loaded["last"][0], ones(4))
    row: list = [1]
    row += [Holder(lambda: row.clear()), ones(100), [2]]
    assert load(save({"row": row}))["row"] == [1, None]
    ordered = collections.OrderedDict(a=Holder(lambda: ordered.clear()), b=[ones(2)])
    assert torch.equal(load(save({"o": ordered}))["o"]["b"][0], ones(2))


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), KeyboardInterrupt(), MemoryError(), SystemExit(2)])
def test_what_an_object_raises_comes_out(error):
    def give():
        raise error

    for state in (
        {"a": Holder(give)},
        [[{"x": (Holder(give), ones(1))}]],
        {1: collections.OrderedDict(a=Holder(give))},
    ):
        with pytest.raises(type(error)):
            flatten(state)


def test_a_state_inside_which_another_one_is_saved():
    inner = {"x": ones(3), "y": [1, {"z": (ones(2),)}]}
    want = save(inner)
    found = []
    state = {"a": Holder(lambda: found.append(stored(flatten(inner))) or inner), "b": inner}
    save(state)
    assert (found[0].document, found[0].data) == (want.document, want.data)
    assert both({"b": inner, "a": Holder(lambda: inner)})
