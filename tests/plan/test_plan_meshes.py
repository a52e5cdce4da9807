from __future__ import annotations

import pickle
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_layouts import layouts, shapes, spread, torch_local, torch_shape_and_offset

from tierload.errors import InvalidRequest
from tierload.plan import LocalBox, holders, local_boxes, local_elements, local_shape, overlap, replica
from tierload.types import Box, Layout, Mesh


def line(count: int, *placements: int | tuple[int, int] | None) -> Layout:
    return Layout(Mesh((count,), tuple(range(count))), placements)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def put_together(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The local tensor as its boxes say; -1 where none does."""
    local = torch.full(local_shape(tuple(whole.shape), layout, rank), -1)
    for box, at in local_boxes(tuple(whole.shape), layout, rank):
        assert (local[slices(at, box.sizes)] == -1).all()
        local[slices(at, box.sizes)] = whole[slices(*box)]
    return local


def check_against_torch(shape: tuple[int, ...], layout: Layout) -> None:
    whole, elements = numbered(shape), local_elements(shape, layout)
    assert elements.shape == layout.mesh.shape
    for rank, count in zip(layout.mesh.ranks, elements.reshape(-1), strict=True):
        want = torch_local(whole, layout, rank)
        assert count == want.numel()
        assert torch.equal(put_together(whole, layout, rank), want)
        boxes = local_boxes(shape, layout, rank)
        if 0 not in shape:  # of a tensor without elements torch gives an offset that means nothing
            torch_shape, torch_offset = torch_shape_and_offset(shape, layout, rank)
            assert local_shape(shape, layout, rank) == torch_shape
            assert not boxes or boxes[0].box.offsets == torch_offset


@settings(deadline=None, max_examples=300)
@given(spread)
def test_every_rank_holds_what_torch_gives_it(case: tuple[tuple[int, ...], Layout]) -> None:
    check_against_torch(*case)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((6,), line(4, 0)),
        ((4096, 3), line(30, 0)),
        ((1, 5, 7), line(2, 0)),
        ((3, 1), line(8, 1)),
        ((9,), line(4, (0, 2))),
        ((8, 8), Layout(Mesh((2, 2), (0, 1, 2, 3)), ((0, 2), 0))),
        ((17, 3), Layout(Mesh((2, 2, 3), tuple(range(12))), ((0, 3), None, 0))),
        ((7,), Layout(Mesh((2, 2), (0, 1, 2, 3)), (0, (0, 2)))),
        ((), line(3, None)),
    ],
)
def test_uneven_and_empty_shards_are_as_torch_has_them(shape: tuple[int, ...], layout: Layout) -> None:
    check_against_torch(shape, layout)


@settings(deadline=None, max_examples=200)
@given(spread)
def test_no_two_boxes_of_a_rank_could_be_one(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    for rank in layout.mesh.ranks:
        boxes = local_boxes(shape, layout, rank)
        for a in boxes:
            for b in boxes:
                ends = [a.box.offsets[d] + a.box.sizes[d] == b.box.offsets[d] for d in range(len(shape))]
                same = [a.box.offsets[d] == b.box.offsets[d] for d in range(len(shape))]
                assert not any(ends[d] and all(same[:d] + same[d + 1 :]) for d in range(len(shape)))


def test_fsdp_over_tensor_parallel_holds_one_box() -> None:
    layout = Layout(Mesh((4, 2), tuple(range(8))), ((0, 2), 0))
    assert local_boxes((64, 3), layout, 5) == (LocalBox(Box((48, 0), (8, 3)), (0, 0)),)


def test_a_strided_shard_says_where_its_boxes_lie() -> None:
    assert local_boxes((9,), line(4, (0, 2)), 0) == (
        LocalBox(Box((0,), (2,)), (0,)),
        LocalBox(Box((5,), (1,)), (2,)),
    )


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    layout = Layout(Mesh((2,), (4, 5)), (0,))
    assert local_boxes((8,), layout, 3) == ()
    assert local_shape((8,), layout, 3) == (0,)
    with pytest.raises(InvalidRequest, match="rank 3"):
        replica(layout, 3)


def test_replicas_are_counted_row_major_over_what_is_replicated() -> None:
    layout = Layout(Mesh((2, 2, 3), tuple(range(12))), (None, 0, None))
    assert [replica(layout, rank) for rank in range(12)] == [
        *((copy, 6) for copy in (0, 1, 2, 0, 1, 2)),
        *((copy, 6) for copy in (3, 4, 5, 3, 4, 5)),
    ]


@settings(deadline=None, max_examples=200)
@given(spread, st.data())
def test_the_holders_of_a_box_are_those_of_whom_a_box_meets_it(
    case: tuple[tuple[int, ...], Layout], data: st.DataObject
) -> None:
    shape, layout = case
    offsets = tuple(data.draw(st.integers(0, extent)) for extent in shape)
    box = Box(offsets, tuple(data.draw(st.integers(0, e - o)) for e, o in zip(shape, offsets, strict=True)))
    writer = data.draw(st.integers(0, replica(layout, layout.mesh.ranks[0])[1] - 1))
    want = [
        (rank, held)
        for rank in layout.mesh.ranks
        if replica(layout, rank)[0] == writer
        for held, _ in local_boxes(shape, layout, rank)
        if overlap(held, box) is not None
    ]
    assert sorted(holders(shape, layout, writer, box)) == sorted(want)


@settings(deadline=None, max_examples=100)
@given(spread)
def test_every_element_has_one_holder_of_each_replica(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    for writer in range(replica(layout, layout.mesh.ranks[0])[1]):
        times = torch.zeros(shape, dtype=torch.int64)
        for _, box in holders(shape, layout, writer, Box((0,) * len(shape), shape)):
            times[slices(*box)] += 1
        assert (times == 1).all()


def test_a_box_of_ten_thousand_shards_has_the_few_holders_that_it_meets() -> None:
    found = holders((100_003, 2), line(10_000, 0), 0, Box((54, 1), (12, 1)))
    assert found == ((4, Box((44, 0), (11, 2))), (5, Box((55, 0), (11, 2))))


@given(shapes(1).flatmap(lambda shape: layouts(len(shape))))
def test_equal_layouts_are_one_key_wherever_they_come_from(layout: Layout) -> None:
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert len({again, layout}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Mesh((2, 2), (0, 1, 2)),
        lambda: Mesh((2,), (1, 1)),
        lambda: line(2, 0, None),
        lambda: local_shape((4,), line(2, -1), 0),
        lambda: local_boxes((4,), line(2, (0, 0)), 0),
        lambda: local_boxes((4,), line(2, 1), 0),
        lambda: holders((4,), line(2, 0), 1, Box((0,), (4,))),
    ],
)
def test_what_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(InvalidRequest):
        wrong()
