"""States of pieces of tensors in memory, their pages, and a reader of them that knows nothing of planning."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from tierload.layout import ManifestTable, PagePlan, ReadPlan, plan_pages
from tierload.layout.rows import PAGE_ROW
from tierload.types import ChunkTable, FlatState

PAGE = 4096


class Piece(NamedTuple):
    """A chunk of single bytes."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, key: str, *shape: int) -> Piece:
        return cls(key, shape, (0,) * len(shape), shape)

    @classmethod
    def rows(cls, key: str, shape: tuple[int, ...], begin: int, end: int) -> Piece:
        return cls(key, shape, (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))


class Stored:
    """Pieces with random bytes, planned and laid out in pages."""

    def __init__(self, pieces: Sequence[Piece], page_bytes: int = PAGE, pack_below: int = 1024) -> None:
        pieces = sorted(pieces, key=lambda piece: (piece.key.encode(), piece.offsets))
        generator = np.random.default_rng(len(pieces))
        self.data = [generator.integers(0, 256, prod(piece.sizes), np.uint8) for piece in pieces]
        keys = [piece.key.encode("utf-8", "surrogatepass") for piece in pieces]
        lengths = np.array([len(key) for key in keys], np.int64)
        ndims = np.array([len(piece.shape) for piece in pieces], np.uint8)
        count = len(pieces)
        dims = [number for piece in pieces for part in piece[1:] for number in part]
        table = ChunkTable(
            keys=b"".join(keys),
            key_offsets=np.cumsum(lengths) - lengths,
            key_lengths=lengths,
            dtypes=np.full(count, 2, np.uint8),
            ndims=ndims,
            dims_at=np.cumsum(3 * ndims.astype(np.int64)) - 3 * ndims,
            dims=np.array(dims, np.int64),
            nbytes=np.array([len(data) for data in self.data], np.int64),
        )
        pointers = np.array([data.ctypes.data for data in self.data], np.uint64)
        item_sizes, floating = np.ones(count, np.uint8), np.zeros(count, np.bool_)
        devices = np.zeros(len(pointers), np.uint8)
        flat = FlatState(table, pointers, devices, {}, item_sizes, floating, self.data, b"{}")
        self.plan: PagePlan = plan_pages(flat, page_bytes, pack_below)
        self.lay_out()
        rows = np.zeros(len(self.pages), PAGE_ROW)
        rows["raw_length"] = [len(page) for page in self.pages]
        sections = (rows, self.plan.rows, table.dims, np.frombuffer(table.keys, np.uint8))
        self.table = ManifestTable(*(np.ascontiguousarray(section).view(np.uint8) for section in sections))

    def lay_out(self) -> None:
        """Fills the pages with what ``data`` holds now."""
        parts = iter(zip(self.plan.owners.tolist(), self.plan.starts.tolist(), self.plan.lengths.tolist(), strict=True))
        self.pages: list[bytes] = []
        for count in self.plan.parts_of_page.tolist():
            taken = [next(parts) for _ in range(count)]
            self.pages.append(b"".join(self.data[owner][at : at + n].tobytes() for owner, at, n in taken))
        assert next(parts, None) is None

    def read(self, plan: ReadPlan, memory: np.ndarray) -> None:
        """Carries out a plan whose pointers are offsets in ``memory``, which no two parts may share."""
        touched = np.zeros(len(memory), np.bool_)
        for page, offset, pointer, length in zip(plan.pages, plan.offsets, plan.pointers, plan.lengths, strict=True):
            assert 0 < length <= len(self.pages[page]) - offset
            here = slice(int(pointer), int(pointer + length))
            assert not touched[here].any()
            touched[here] = True
            memory[here] = np.frombuffer(self.pages[page], np.uint8, int(length), int(offset))
