from __future__ import annotations

from itertools import pairwise
from math import prod

from hypothesis import given
from hypothesis import strategies as st
from plan_tables import PAGE, Piece, Stored


def lengths_of(stored: Stored, number: int) -> list[int]:
    """The lengths of the pages of one chunk."""
    row = stored.plan.rows[number]
    first, count = int(row["first_page"]), int(row["pages"])
    return [len(page) for page in stored.pages[first : first + count]]


@given(st.lists(st.lists(st.integers(0, 60), max_size=3).map(tuple), max_size=8))
def test_whole_chunks_are_cut_from_their_first_byte_on(shapes: list[tuple[int, ...]]) -> None:
    stored = Stored([Piece.whole(f"{number:02}", *shape) for number, shape in enumerate(shapes)])
    sizes = [prod(shape) for shape in shapes]
    large = [number for number, size in enumerate(sizes) if size >= 1024]
    first = 0
    for number in large:
        size, row = sizes[number], stored.plan.rows[number]
        assert int(row["first_page"]) == first
        assert lengths_of(stored, number) == [PAGE] * (size // PAGE) + [size % PAGE] * (size % PAGE > 0)
        first += int(row["pages"])
    small = [number for number, size in enumerate(sizes) if 0 < size < 1024]
    packed = b"".join(stored.data[number].tobytes() for number in small)
    assert b"".join(stored.pages[first:]) == packed


@st.composite
def cut_twice(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    shape = (draw(st.integers(1, 40)), draw(st.integers(1, 30)), draw(st.integers(1, 60)))
    cuts = st.lists(st.integers(0, shape[0]), max_size=4).map(lambda inner: sorted({0, shape[0], *inner}))
    return shape, draw(cuts), draw(cuts)


def global_pages(shape: tuple[int, ...], cuts: list[int]) -> set[tuple[int, int]]:
    """Where the pages of rows, cut at ``cuts``, begin and end in the bytes of the whole tensor."""
    stored = Stored([Piece.rows("w", shape, begin, end) for begin, end in pairwise(cuts)], pack_below=0)
    found = set()
    for number, begin in enumerate(cuts[:-1]):
        at = begin * prod(shape[1:])
        for length in lengths_of(stored, number):
            found.add((at, at + length))
            at += length
    return found


@given(cut_twice())
def test_pages_without_a_cut_in_them_are_the_same_however_rows_are_cut(
    case: tuple[tuple[int, ...], list[int], list[int]],
) -> None:
    shape, one, other = case
    size = prod(shape)
    cuts = {row * prod(shape[1:]) for row in (*one, *other)}
    whole = {(at, min(at + PAGE, size)) for at in range(0, size, PAGE)}
    untouched = {(begin, end) for begin, end in whole if not any(begin < cut < end for cut in cuts)}
    assert untouched <= global_pages(shape, one) & global_pages(shape, other)
    assert all(begin // PAGE == (end - 1) // PAGE for begin, end in global_pages(shape, one))


def test_a_part_that_is_not_whole_rows_is_cut_from_its_first_byte_on() -> None:
    columns = Piece("w", (100, 200), (50, 10), (50, 100))
    assert lengths_of(Stored([columns]), 0) == [PAGE, 5000 - PAGE]


def test_rows_that_begin_within_a_page_end_it_first() -> None:
    stored = Stored([Piece.rows("w", (100, 200), 50, 100)])
    assert lengths_of(stored, 0) == [3 * PAGE - 10_000, PAGE, 20_000 - 4 * PAGE]
    assert stored.plan.starts.tolist() == [0, 3 * PAGE - 10_000, 4 * PAGE - 10_000]
