from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierload.plan import LocalBox, copies, overlap
from tierload.types import Box


def inside(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes of a tensor, empty ones too."""
    line = [
        st.integers(0, extent).flatmap(lambda at, n=extent: st.tuples(st.just(at), st.integers(0, n - at)))
        for extent in shape
    ]
    return st.tuples(*line).map(lambda pairs: Box(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)))


def where(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


shape_and_boxes = (
    st.lists(st.integers(1, 6), max_size=4)
    .map(tuple)
    .flatmap(lambda shape: st.tuples(st.just(shape), inside(shape), inside(shape)))
)


@given(shape_and_boxes)
def test_overlap_is_what_both_hold(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    in_a, in_b, in_both = (np.zeros(shape, np.bool_) for _ in range(3))
    in_a[where(a)], in_b[where(b)] = True, True
    shared = overlap(a, b)
    if shared is not None:
        in_both[where(shared)] = True
    assert (in_both == (in_a & in_b)).all()
    assert shared is None or in_both.any()


@settings(deadline=None, max_examples=300)
@given(shape_and_boxes, st.data())
def test_copies_fill_a_target_of_any_strides_as_slicing_does(
    case: tuple[tuple[int, ...], Box, Box], data: st.DataObject
) -> None:
    shape, stored, target = case
    ndim, item = len(shape), data.draw(st.sampled_from([1, 2, 4]))
    whole = np.arange(1, prod(shape) + 1, dtype=f"<u{item}").reshape(shape)
    held = whole[where(stored)].tobytes()

    at = tuple(data.draw(st.integers(0, 2)) for _ in shape)
    local_shape = [a + size for a, size in zip(at, target.sizes, strict=True)]
    order = data.draw(st.permutations(range(ndim)))
    gap = data.draw(st.integers(1, 2))
    memory = np.zeros([local_shape[dim] for dim in order] + [gap], f"<u{item}")
    local = memory[..., 0].transpose([order.index(dim) for dim in range(ndim)])
    flip = data.draw(st.booleans()) and ndim > 0
    local = local[::-1] if flip else local
    want = np.zeros(local_shape, f"<u{item}")
    shared = overlap(stored, target)
    if shared is not None:
        place = tuple(o - t + a for o, t, a in zip(shared.offsets, target.offsets, at, strict=True))
        want[where(Box(place, shared.sizes))] = whole[where(shared)]

    sources, destinations, lengths = copies(stored, LocalBox(target, at), local.strides, item)
    assert sources.dtype == destinations.dtype == lengths.dtype == np.int64
    assert (np.diff(sources) > 0).all()
    base = memory.reshape(-1).view(np.uint8)
    first = (local_shape[0] - 1) * -local.strides[0] if flip and memory.size else 0
    for source, destination, length in zip(sources, destinations, lengths, strict=True):
        begin = first + destination
        assert (base[begin : begin + length] == 0).all()
        base[begin : begin + length] = np.frombuffer(held[source : source + length], np.uint8)
    assert (local == want).all()
    joined = (sources[1:] == (sources + lengths)[:-1]) & (destinations[1:] == (destinations + lengths)[:-1])
    assert not joined.any()


@pytest.mark.parametrize(
    ("stored", "target", "runs"),
    [
        (Box((0, 0), (8, 4)), Box((2, 0), (4, 4)), 1),
        (Box((0, 0), (8, 4)), Box((2, 0), (4, 2)), 4),
        (Box((0, 0), (8, 2)), Box((0, 1), (8, 3)), 8),
        (Box((0, 0), (8, 4)), Box((0, 2), (8, 4)), 8),  # as wide, yet not the same columns
        (Box((3, 0), (1, 4)), Box((0, 2), (8, 2)), 1),
        (Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), 0),
    ],
)
def test_rows_that_follow_one_another_on_both_sides_are_one_run(stored: Box, target: Box, runs: int) -> None:
    strides = (4 * target.sizes[1], 4)
    sources, _, lengths = copies(stored, LocalBox(target, (0, 0)), strides, 4)
    shared = overlap(stored, target)
    assert len(sources) == runs
    assert lengths.sum() == (4 * prod(shared.sizes) if shared else 0)
