from __future__ import annotations

import enum

import hypothesis.strategies as st
import pytest
import torch
from alike import assert_alike
from fake_engine import load, round_trip, save
from hypothesis import example, given, settings

from tierload.errors import KeyMismatch, UnsupportedValue
from tierload.state.keys import ROOT, KeyFilter, element_text


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("elements", "text"),
    [
        (["a", "b"], "a/b"),
        (["a.b"], "a.b"),
        (["a/b"], "a~1b"),
        (["~"], "~0"),
        (["~1"], "~01"),
        (["#1"], "~21"),
        (["a#"], "a#"),
        ([""], "~3"),
        (["", ""], "~3/~3"),
        (["~3"], "~03"),
        ([1], "#1"),
        ([-1], "#-1"),
        ([True], "#True"),
        ([None], "#None"),
        ([1.5], "#1.5"),
        ([2**70], "#0x400000000000000000"),
        ([(1, "a/b")], "#(1, 'a~1b')"),
        ([(1,)], "#(1,)"),
        ([()], "#()"),
        ([b"a"], "#b'a'"),
        (["名前"], "名前"),
        ([("名",)], "#('\\u540d',)"),
        ([".."], ".."),
        (["nul\0"], "nul\0"),
    ],
)
def test_key_text_is_that_of_the_format(elements, text):
    path = ROOT
    for element in elements:
        path = path.child(element)
    assert path.text() == text
    assert path.inner().text() == text


def test_b59_no_two_keys_collide():
    elements = ["a", "a.b", "a/b", "", 1, "1", (1, 2), None, "名前", "x" * 5000, "..", "nul\0", "#1", "~", "\ud800"]
    state = {element: torch.full((2,), float(number)) for number, element in enumerate(elements)}
    state["a"] = {"b": torch.ones(1), "": torch.zeros(1)}
    saved = save(state)
    assert len(set(saved.keys)) == len(elements) + 1
    assert "a/b" in saved.keys
    assert "a~1b" in saved.keys
    assert_alike(load(saved), state)


ELEMENT = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(), max_size=6)  # lone surrogates too
    | st.text(st.sampled_from("/~#0123a"), max_size=4)
    | st.binary(max_size=4)
    | st.dates()
    | st.just(Color.RED),
    lambda inner: st.tuples(inner, inner) | st.tuples(inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(ELEMENT, min_size=1, max_size=3).map(tuple), unique_by=repr, max_size=8))
@example([("a", "b"), ("a/b",), ("a~1b",)])
@example([("\ud83d\ude00",), ("\U0001f600",)])
def test_key_text_is_injective(paths):
    texts = {}
    for elements in paths:
        path = ROOT
        for element in elements:
            path = path.child(_placed(element))
        known = texts.setdefault(path.text(), elements)
        assert repr(known) == repr(elements) or known == elements


def _placed(element):
    from tierload.state.containers import key_element

    return key_element(element, ROOT)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(ELEMENT, st.integers(), max_size=8))
def test_dict_keys_of_any_kind_round_trip(state):
    plain = {key: torch.tensor(value % 100) for key, value in state.items()}
    for options in ({}, {"types": [Color]}):
        loaded = load(save(plain), **options)
        assert len(loaded) == len(plain)
        assert [t.item() for t in loaded.values()] == [t.item() for t in plain.values()]
    assert_alike(loaded, plain)


def test_dict_keys_that_become_equal_without_their_types():
    class Other(enum.Enum):
        RED = 1

    state = {Color.RED: torch.ones(1), Other.RED: torch.zeros(1), 1: torch.ones(2)}
    saved = save(state)
    assert len(saved.keys) == 3
    loaded = load(saved)
    assert len(loaded) == 3
    assert loaded[1].shape == (1,)


def test_nan_keys_that_share_their_text_are_refused():
    with pytest.raises(UnsupportedValue, match="#nan"):
        save({float("nan"): torch.ones(1), float("nan"): torch.ones(1)})


def test_unhashable_looking_keys_are_named():
    with pytest.raises(UnsupportedValue, match=r"state\['a'\].*object"):
        save({"a": {object(): 1}})
    with pytest.raises(UnsupportedValue, match="Tensor"):
        save({"a": {torch.ones(1)}})


def test_filter_patterns():
    keys = KeyFilter(["model", "opt*/exp_avg", "x[[]0]"])

    def wants(*elements):
        path = ROOT
        for element in elements:
            path = path.child(element)
        return keys.wants(path)

    assert wants("model")
    assert wants("model", "a.weight")
    assert not wants("model2")
    assert wants("optimizer", "state", "w", "exp_avg")
    assert not wants("optimizer", "state", "w", "exp_avg_sq")
    assert wants("x[0]", "y")
    assert keys.unused() == []
    assert KeyFilter(["model", "x[[]1]", "[ab]", "no*"]).unused() == ["model", "x[[]1]", "[ab]", "no*"]
    assert KeyFilter("[ab]").wants(ROOT.child("b"))
    assert not KeyFilter("[[]ab]").wants(ROOT.child("b"))
    assert KeyFilter("[[]ab]").wants(ROOT.child("[ab]"))
    assert not KeyFilter("x[*]0").wants(ROOT.child("xy0"))
    assert KeyFilter("model/*").patterns == ("model/*",)


def test_loading_by_keys():
    state = {
        "model": {"w": torch.ones(2), "b": torch.zeros(3)},
        "step": 7,
        "list": [torch.ones(1), torch.ones(2)],
        "empty": {},
        "other": {"deep": {"x": 1}},
    }
    saved = save(state)
    assert_alike(load(saved, keys=["model/w", "step"]), {"model": {"w": torch.ones(2)}, "step": 7})
    assert_alike(load(saved, keys=["list/#1"]), {"list": [None, torch.ones(2)]})
    assert load(saved, keys=["empty", "other"]) == {"empty": {}, "other": {"deep": {"x": 1}}}
    assert_alike(load(saved, keys="*"), state)
    with pytest.raises(KeyMismatch, match="modle"):
        load(saved, keys=["modle/*", "step"])


def test_only_wanted_chunks_are_read():
    from tierload.state import plan_load

    saved = save({"a": torch.ones(2), "b": torch.ones(3), "c": bytes(5000)})
    plan = plan_load(saved.document, saved.chunks, keys=["b"])
    assert plan.destinations.chunks.tolist() == [1]
    assert plan.keys_of(1) == ("b",)
    assert plan.keys_of(0) == ()
    assert plan.in_place == frozenset()


def test_element_text_of_the_root_is_empty():
    assert ROOT.text() == ""
    assert save(torch.ones(1)).keys == [""]
    assert round_trip(torch.ones(1)).tolist() == [1.0]
    assert element_text("a") == "a"
