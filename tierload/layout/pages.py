"""Cutting chunks into pages: a large chunk has pages of its own, small ones of one dtype share packed pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from tierload.layout.rows import CHUNK_PACKED, CHUNK_ROW
from tierload.types import ChunkSource

__all__ = ["PagePlan", "plan_pages"]

# A packed page is written anew when any of its chunks changes, so it is kept smaller than others.
_PACKED_PAGE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class PagePlan:
    """What the native core needs to write a state, as flat arrays.

    A page is made of ``parts_of_page[i]`` consecutive parts; part ``j`` is ``lengths[j]`` bytes at ``pointers[j]``, or,
    when ``part_views[j]`` is not 0, those from byte ``part_offsets[j]`` on of the packed elements of the view of that
    number (from 1) at ``pointers[j]``. ``views`` has for each: element size, dimensions, sizes, strides in bytes.
    ``chunks`` and ``dims`` are the manifest's sections of these names and ``keys`` its heap of keys; the key hashes are
    filled in by whoever can compute them.
    """

    pointers: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    part_views: npt.NDArray[np.uint32]
    part_offsets: npt.NDArray[np.uint64]
    views: npt.NDArray[np.int64]
    parts_of_page: npt.NDArray[np.uint32]
    item_sizes: npt.NDArray[np.uint8]
    floating: npt.NDArray[np.uint8]
    packed: npt.NDArray[np.uint8]
    chunks: npt.NDArray[np.void]
    dims: npt.NDArray[np.int64]
    keys: bytes


_Part = tuple[int, int, int, int]  # pointer, length, view, offset in the view


class _Pages:
    """Pages as they are planned, one list a column."""

    def __init__(self) -> None:
        self.pointers: list[int] = []
        self.lengths: list[int] = []
        self.part_views: list[int] = []
        self.part_offsets: list[int] = []
        self.views: list[int] = []
        self.view_count = 0
        self.parts: list[int] = []
        self.item_sizes: list[int] = []
        self.floating: list[bool] = []
        self.packed: list[bool] = []

    def view(self, chunk: ChunkSource) -> int:
        """The number of a chunk's view; 0 when its bytes lie together."""
        if not chunk.strides:
            return 0
        element_bytes = chunk.nbytes // prod(chunk.sizes)  # of a complex number: two items
        self.views += (element_bytes, len(chunk.sizes), *chunk.sizes, *chunk.strides)
        self.view_count += 1
        return self.view_count

    def add(self, parts: Sequence[_Part], item_size: int, floating: bool, packed: bool) -> int:
        """Adds a page; returns its number."""
        for pointer, length, view, offset in parts:
            self.pointers.append(pointer)
            self.lengths.append(length)
            self.part_views.append(view)
            self.part_offsets.append(offset)
        self.parts.append(len(parts))
        self.item_sizes.append(item_size)
        self.floating.append(floating)
        self.packed.append(packed)
        return len(self.parts) - 1


def plan_pages(chunks: Sequence[ChunkSource], page_bytes: int, pack_below_bytes: int) -> PagePlan:
    """Plans the pages of chunks that are sorted by key.

    The plan depends on the chunks' keys, types and sizes alone, so the same state always has the same pages. Pages of
    large chunks come first, in key order, then packed ones by dtype.
    """
    pages = _Pages()
    rows = np.zeros(len(chunks), CHUNK_ROW)
    dims: list[int] = []
    keys = bytearray()
    small: dict[int, list[int]] = {}
    for number, chunk in enumerate(chunks):
        key = chunk.key.encode("utf-8", "surrogatepass")
        row = rows[number]
        row["key_offset"], row["key_length"] = len(keys), len(key)
        keys += key
        row["dtype"], row["ndim"], row["dims"] = chunk.dtype, len(chunk.shape), len(dims)
        dims += (*chunk.shape, *chunk.offsets, *chunk.sizes)
        row["bytes"] = chunk.nbytes
        if chunk.nbytes == 0:
            continue
        if chunk.nbytes < pack_below_bytes:
            small.setdefault(chunk.dtype, []).append(number)
            continue
        row["first_page"] = len(pages.parts)
        view = pages.view(chunk)
        for offset in range(0, chunk.nbytes, page_bytes):
            length = min(page_bytes, chunk.nbytes - offset)
            part = (chunk.pointer, length, view, offset) if view else (chunk.pointer + offset, length, 0, 0)
            pages.add([part], chunk.item_size, chunk.floating, packed=False)
        row["pages"] = len(pages.parts) - int(row["first_page"])
    for dtype in sorted(small):
        _pack(pages, rows, [(number, chunks[number]) for number in small[dtype]], min(page_bytes, _PACKED_PAGE_BYTES))
    return PagePlan(
        pointers=np.array(pages.pointers, np.uint64),
        lengths=np.array(pages.lengths, np.uint64),
        part_views=np.array(pages.part_views, np.uint32),
        part_offsets=np.array(pages.part_offsets, np.uint64),
        views=np.array(pages.views, np.int64),
        parts_of_page=np.array(pages.parts, np.uint32),
        item_sizes=np.array(pages.item_sizes, np.uint8),
        floating=np.array(pages.floating, np.uint8),
        packed=np.array(pages.packed, np.uint8),
        chunks=rows,
        dims=np.array(dims, np.int64),
        keys=bytes(keys),
    )


def _pack(
    pages: _Pages, rows: npt.NDArray[np.void], chunks: Sequence[tuple[int, ChunkSource]], packed_bytes: int
) -> None:
    """Puts small chunks of one dtype back to back into packed pages."""
    parts: list[_Part] = []
    held = 0
    source = chunks[0][1]
    for number, chunk in chunks:
        if held and held + chunk.nbytes > packed_bytes:
            pages.add(parts, source.item_size, source.floating, packed=True)
            parts, held = [], 0
        row = rows[number]
        row["flags"] = CHUNK_PACKED
        row["first_page"], row["pages"], row["page_offset"] = len(pages.parts), 1, held
        parts.append((chunk.pointer, chunk.nbytes, pages.view(chunk), 0))
        held += chunk.nbytes
    pages.add(parts, source.item_size, source.floating, packed=True)
