from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_tables import Piece, Stored

from tierload.errors import CorruptStore
from tierload.types import Destinations

# Packed chunks, chunks of several pages, rows whose first page is short, and one without bytes.
STORED = Stored(
    [
        *(Piece.whole(f"bias.{n}", 100 + n) for n in range(20)),
        Piece.whole("empty", 0),
        Piece.whole("scalar"),
        Piece.whole("large", 30_000),
        Piece.rows("rows", (100, 200), 0, 33),
        Piece.rows("rows", (100, 200), 33, 99),
        Piece.rows("rows", (100, 200), 99, 100),
        Piece("tile", (10, 4000), (5, 1000), (5, 1500)),
        Piece("tile", (10, 4000), (0, 0), (5, 1000)),
    ]
)


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Parts of chunks: number, first byte, length."""
    found = []
    for number in draw(st.lists(st.integers(0, len(STORED.data) - 1), max_size=12)):
        size = len(STORED.data[number])
        begin = draw(st.integers(0, size))
        found.append((number, begin, draw(st.integers(0, size - begin))))
    return found


@settings(deadline=None, max_examples=200)
@given(parts())
def test_parts_of_chunks_are_read_from_the_pages_that_hold_them(wanted: list[tuple[int, int, int]]) -> None:
    chunks, sources, lengths = np.array(wanted, np.int64).reshape(-1, 3).T
    pointers = np.cumsum(lengths) - lengths
    owners = np.arange(len(wanted), dtype=np.uint32) + 7
    plan = STORED.table.plan_parts(chunks, sources, pointers.astype(np.uint64), lengths, owners)
    memory = np.zeros(int(lengths.sum()), np.uint8)
    STORED.read(plan, memory)
    want = [STORED.data[chunk][at : at + length] for chunk, at, length in wanted]
    assert memory.tobytes() == b"".join(data.tobytes() for data in want)
    assert (np.diff(plan.pages.astype(np.int64)) >= 0).all()
    for owner, pointer, length in zip(plan.owners, plan.pointers, plan.lengths, strict=True):
        begin = pointers[owner - 7]
        assert begin <= pointer <= pointer + length <= begin + lengths[owner - 7]


def test_whole_chunks_are_read_page_by_page() -> None:
    sizes = np.array([len(data) for data in STORED.data])
    pointers = (np.cumsum(sizes) - sizes).astype(np.uint64)
    plan = STORED.table.plan_reads(Destinations(np.arange(len(sizes)), pointers, None))
    memory = np.zeros(int(sizes.sum()), np.uint8)
    STORED.read(plan, memory)
    assert memory.tobytes() == b"".join(data.tobytes() for data in STORED.data)
    assert len(plan.pages) == int(STORED.plan.rows["pages"].sum())


@pytest.mark.parametrize(("source", "length"), [(0, 30_001), (29_999, 2), (-1, 5), (5, -1), (30_001, 0)])
def test_a_part_beyond_its_chunk_is_refused(source: int, length: int) -> None:
    (large,) = STORED.table.pieces("large")
    columns = np.array([large.number]), np.array([source]), np.zeros(1, np.uint64), np.array([length])
    with pytest.raises(CorruptStore, match="fewer bytes"):
        STORED.table.plan_parts(*columns, np.zeros(1, np.uint32))


def test_the_pieces_of_a_key_come_in_the_order_of_their_offsets() -> None:
    assert [(piece.offsets, piece.sizes) for piece in STORED.table.pieces("rows")] == [
        ((0, 0), (33, 200)),
        ((33, 0), (66, 200)),
        ((99, 0), (1, 200)),
    ]
    assert [piece.offsets for piece in STORED.table.pieces("tile")] == [(0, 0), (5, 1000)]


def test_every_piece_has_the_number_of_its_chunk() -> None:
    for info in STORED.table.chunks.infos():
        assert info in STORED.table.pieces(info.key)


@pytest.mark.parametrize("key", ["", "a", "bias", "row", "rowss", "zz", "\ud800"])
def test_a_key_that_is_not_there_has_no_pieces(key: str) -> None:
    assert STORED.table.pieces(key) == []


def test_an_empty_manifest_has_no_pieces() -> None:
    assert Stored([]).table.pieces("w") == []
