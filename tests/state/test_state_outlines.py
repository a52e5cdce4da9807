"""The outline of a saved state serves for the next one of the same structure, and never for another."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from fake_engine import stored
from hypothesis import given, settings
from two_ways import Maker, facts_of, outcome, tensors_of

from tierload.layout import plan_pages
from tierload.state import flatten

PAGE, PACK = 64, 16  # small, so that states have large and packed chunks


def assert_plans_equal(plan, want) -> None:
    for field in dataclasses.fields(want):
        one, other = getattr(plan, field.name), getattr(want, field.name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype, field.name
            assert one.tolist() == other.tolist(), field.name
        elif field.name != "chunks":
            assert one == other, field.name


def check(first: object, second: object, same: bool | None = None) -> None:
    """The second state is stored as if there had been no first, and so are its pages."""
    like = outcome(lambda: flatten(first))
    if isinstance(like, str):
        return
    alone, after = outcome(lambda: flatten(second)), outcome(lambda: flatten(second, like=like.outline))
    if isinstance(alone, str):
        assert after == alone
        return
    assert facts_of(after) == facts_of(alone)
    plan = plan_pages(like, PAGE, PACK)
    if same is not None:
        assert (after.chunks is like.chunks) == same
    again = plan.again(after, PAGE, PACK)
    assert (again is not None) == (after.chunks is like.chunks)
    want = plan_pages(after, PAGE, PACK)
    assert_plans_equal(again or want, plan_pages(after, PAGE, PACK))
    if again is not None:
        assert again.chunks is want.chunks
        assert plan.again(after, PAGE * 2, PACK) is None
        assert plan.again(after, PAGE, PACK * 2) is None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_structure_with_other_values(seed):
    second = Maker(seed).state()
    for number, tensor in enumerate(tensors_of(second)):
        storage = tensor.untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).fill_(number)
    flat = outcome(lambda: flatten(Maker(seed).state()))
    check(Maker(seed).state(), second, None if isinstance(flat, str) else True)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_any_two_states(seed, other):
    check(Maker(seed).state(), Maker(other).state())
    first, second = Maker(seed).state(), Maker(seed).state()
    maker = Maker(other)
    second["weights"][maker.random.choice(["w0", "w1", "x"])] = maker.tensor()
    check(first, second)
    check(second, first)


ones = torch.ones
BASE = {"a": ones(2, 6), "b": {"c": ones(40), "d": [ones(3, dtype=torch.int64), 5]}, "e": b"x" * 5000}


def changed(**changes: object) -> dict:
    return {**BASE, **changes}


_SHARED = ones(40)
TIED = changed(a=_SHARED[:12].view(2, 6), b={"c": _SHARED, "d": [ones(3, dtype=torch.int64), 5]})


@pytest.mark.parametrize(
    ("second", "same"),
    [
        (changed(a=ones(2, 6) * 7), True),
        (changed(a=torch.nn.Parameter(ones(2, 6))), True),
        (changed(a=ones(2, 6, requires_grad=True)), True),
        (changed(e=b"y" * 5000), True),
        (changed(more="a scalar"), True),
        (changed(b={"c": ones(40), "d": (ones(3, dtype=torch.int64), 6)}), True),  # a tuple has the keys of a list
        ({key: BASE[key] for key in reversed(BASE)}, False),
        (changed(e=b"y" * 5001), False),
        (changed(e=bytearray(5000)), True),
        (changed(a=ones(12)), False),
        (changed(a=ones(6, 2)), False),
        (changed(a=ones(6, 2).t()), False),
        (changed(a=ones(2, 12)[:, ::2]), False),
        (changed(a=ones(2, 6, dtype=torch.int32)), False),
        (changed(a=ones(2, 6).bfloat16()), False),
        (changed(a=None), False),
        (changed(f=ones(1)), False),
        (changed(b={"c": ones(40), "D": [ones(3, dtype=torch.int64), 5]}), False),
        (TIED, False),
        ({}, False),
    ],
)
def test_one_difference(second, same):
    check(BASE, second, same)
    check(second, BASE, same)
    check(second, second, True)


def test_ties_and_strides_of_the_same_kind():
    base, other = ones(4, 40), torch.zeros(4, 40)
    check(TIED, TIED, True)
    check({"a": base[:, ::2], "b": base}, {"a": other[:, ::2], "b": other}, True)
    check({"a": base[:, ::2], "b": base}, {"a": other[:, 1::2], "b": other}, True)  # only the document differs
    check({"a": base[:, ::4]}, {"a": other[:, 1::4]}, True)
    check({"a": base[:, ::4]}, {"a": ones(4, 80)[:, ::8]}, False)
    check({"a": base, "b": base}, {"a": base, "b": other}, False)
    check({"a": base, "b": base, "c": other}, {"a": other, "b": base, "c": base}, False)
    check({"a": base[:2], "b": base[1:]}, {"a": other[:2], "b": other[1:]}, True)


def test_the_order_of_memory_makes_no_difference():
    memory = ones(4, 40)
    rows = [memory[number] for number in range(4)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        first, second = ({f"{i}": rows[place][::2] for i, place in enumerate(each)} for each in (range(4), order))
        check(first, second, True)


def test_an_outline_serves_many_times_and_does_not_change():
    like = flatten(BASE)
    before = facts_of(like)
    for number in range(20):
        flat = flatten(changed(a=ones(2, 6) * number), like=like.outline)
        assert flat.chunks is like.chunks
        assert flat.outline is like.outline
        assert stored(flat).data[0] == (ones(2, 6) * number).numpy().tobytes()
    assert flatten(changed(a=None), like=like.outline).outline is not like.outline
    assert facts_of(like) == before
    assert facts_of(flatten(BASE, like="nonsense")) == before
