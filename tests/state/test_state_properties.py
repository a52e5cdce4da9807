"""Properties of loading into a target: whatever was saved, a blank copy of it becomes equal."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from alike import assert_alike
from fake_engine import bind, load, save
from hypothesis import given, settings
from test_state_tensors import view_of

from tierload.errors import KeyMismatch
from tierload.state import plan_bind

TENSOR = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]),
    st.integers(0, 9),
)
LEAF = TENSOR | st.integers() | st.text(max_size=3) | st.none() | st.binary(max_size=3)
TREE = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, min_size=1, max_size=3)
    ),
    max_leaves=10,
)


def blank(value):
    """The same structure with other content."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    return None


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, dict)):
        return [one for inner in (value.values() if isinstance(value, dict) else value) for one in tensors(inner)]
    return []


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=3), TREE, min_size=1, max_size=4))
def test_a_blank_copy_becomes_equal(state):
    saved = save(state)
    into = blank(state)
    before = tensors(into)
    plan = plan_bind(saved.document, saved.chunks, into)
    assert len(plan.in_place) == sum(tensor.numel() > 0 for tensor in tensors(state))
    report = bind(saved, into)
    assert_alike(into, state)
    assert all(a is b for a, b in zip(before, tensors(into), strict=True))
    assert (report.missing, report.unexpected, report.shapes, report.dtypes) == ((), (), (), ())


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=3), TREE, min_size=1, max_size=4), st.data())
def test_one_difference_is_found_and_nothing_is_changed(state, data):
    state = {"first": torch.ones(2), **state}
    into = copy.deepcopy(state)
    into["first"] = torch.ones(2)
    key = data.draw(st.sampled_from(sorted(state)))
    how = data.draw(st.sampled_from(["missing", "unexpected", "shapes", "dtypes"]))
    if how == "missing":
        into["a new key"] = torch.ones(1)
    elif how == "unexpected":
        del into[key]
        if not into:
            return
    elif how == "shapes":
        into["first"] = torch.zeros(1, 2)
    else:
        into["first"] = torch.zeros(2, dtype=torch.float64)
    before = copy.deepcopy(into)
    saved = save(state)
    with pytest.raises(KeyMismatch) as caught:
        plan_bind(saved.document, saved.chunks, into)
    assert [name for name in ("missing", "unexpected", "shapes", "dtypes") if getattr(caught.value, name)] == [how]
    assert_alike(into, before)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_views_into_separate_tensors_and_into_the_same_views(data):
    base = torch.arange(1, 41, dtype=torch.int32)
    views = data.draw(st.lists(view_of(base), min_size=1, max_size=5))
    state = {f"k{number}": view for number, view in enumerate(views)}
    saved = save(state)
    apart = {key: torch.zeros(view.shape, dtype=torch.int32) for key, view in state.items()}
    bind(saved, apart)
    assert all(torch.equal(apart[key], view) for key, view in state.items())
    other = torch.zeros(40, dtype=torch.int32)
    alike = {key: other.as_strided(v.shape, v.stride(), v.storage_offset()) for key, v in state.items()}
    report = bind(saved, alike, strict=False)
    for key, view in state.items():
        if key in report.shapes:  # it may overlap itself, and is stored as a plain copy
            assert any("plain copy" in note for note in saved.notes)
        else:
            assert torch.equal(alike[key], view)
    assert len(report.loaded) + len(report.shapes) == len(state)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=3), TREE, min_size=1, max_size=4), st.data())
def test_a_part_of_a_state_by_its_keys(state, data):
    saved = save(state)
    key = data.draw(st.sampled_from(sorted(state)))
    from tierload.state.keys import element_text

    pattern = "".join(f"[{mark}]" if mark in "*?[" else mark for mark in element_text(key))
    loaded = load(saved, keys=[pattern])
    assert_alike(loaded[key], state[key])
    assert set(loaded) == {key}
