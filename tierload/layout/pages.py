"""Cutting chunks into pages: a large chunk has pages of its own, small ones of one dtype share packed pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.layout.rows import CHUNK_PACKED, CHUNK_ROW
from tierload.types import ChunkTable, FlatState

__all__ = ["PagePlan", "plan_pages"]

# A packed page is written anew when any of its chunks changes, so it is kept smaller than others.
_PACKED_PAGE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class PagePlan:
    """What the native core needs to write a state, as flat arrays.

    A page is made of ``parts_of_page[i]`` consecutive parts; part ``j`` is ``lengths[j]`` bytes at ``pointers[j]``, or,
    when ``part_views[j]`` is not 0, those from byte ``part_offsets[j]`` on of the packed elements of the view of that
    number (from 1) at ``pointers[j]``. ``views`` has for each: element size, dimensions, sizes, strides in bytes.
    ``rows`` and ``chunks.dims`` are the manifest's sections of chunks and dims, and ``chunks.keys`` its heap of keys.
    Part ``j`` belongs to chunk ``owners[j]``, whose pointer stands ``starts[j]`` bytes before its own; it is in the
    memory of accelerator ``devices[j]`` (0: the processor's).
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
    rows: npt.NDArray[np.void]
    chunks: ChunkTable
    owners: npt.NDArray[np.int64]
    starts: npt.NDArray[np.uint64]
    devices: npt.NDArray[np.uint8]
    sizes: tuple[int, int]

    def again(self, flat: FlatState, page_bytes: int, pack_below_bytes: int) -> PagePlan | None:
        """The plan of a state whose chunks are the same: this one, where they are in the same memory too, else another;
        None when they are not."""
        if flat.chunks is not self.chunks or self.sizes != (page_bytes, pack_below_bytes):
            return None
        pointers, devices = flat.pointers[self.owners] + self.starts, flat.devices[self.owners]
        if np.array_equal(pointers, self.pointers) and np.array_equal(devices, self.devices):
            return self
        return replace(self, pointers=pointers, devices=devices)

    def some(self, pages: npt.NDArray[np.int64]) -> PagePlan:
        """Some of the pages of a plan that packs none: every page has one part."""
        return replace(
            self,
            pointers=self.pointers[pages],
            lengths=self.lengths[pages],
            part_views=self.part_views[pages],
            part_offsets=self.part_offsets[pages],
            parts_of_page=self.parts_of_page[pages],
            item_sizes=self.item_sizes[pages],
            floating=self.floating[pages],
            packed=self.packed[pages],
            owners=self.owners[pages],
            starts=self.starts[pages],
            devices=self.devices[pages],
        )


def plan_pages(flat: FlatState, page_bytes: int, pack_below_bytes: int) -> PagePlan:
    """Plans the pages of a state.

    The plan depends on the chunks' keys, types and sizes alone, and on where parts of a tensor begin in it, so the same
    state always has the same pages. Pages of large chunks come first, in key order, then packed ones by dtype.
    """
    chunks = flat.chunks
    rows = np.zeros(len(chunks), CHUNK_ROW)
    rows["key_offset"], rows["key_length"] = chunks.key_offsets, chunks.key_lengths
    rows["dtype"], rows["ndim"], rows["dims"] = chunks.dtypes, chunks.ndims, chunks.dims_at
    rows["bytes"] = chunks.nbytes
    rows["key_hash"] = _native.key_hashes(chunks.keys, chunks.key_lengths)
    view_of, views = _views(flat)

    large = np.flatnonzero(chunks.nbytes >= max(pack_below_bytes, 1))
    skips = _skips(chunks, large, page_bytes)
    counts = -(-(chunks.nbytes[large] + skips) // page_bytes)
    firsts = np.cumsum(counts) - counts
    rows["first_page"][large], rows["pages"][large] = firsts, counts
    owners = np.repeat(large, counts)
    offsets = np.arange(len(owners)) * page_bytes - np.repeat(firsts * page_bytes + skips, counts)
    lengths = np.minimum(chunks.nbytes[owners] - offsets, page_bytes)
    offsets[firsts] += skips
    lengths[firsts] -= skips

    packed, packed_counts = _pack(rows, chunks, pack_below_bytes, min(page_bytes, _PACKED_PAGE_BYTES), len(owners))
    first_owners = np.concatenate([owners, packed[np.cumsum(packed_counts) - packed_counts]])
    owners = np.concatenate([owners, packed])
    offsets = np.concatenate([offsets, np.zeros(len(packed), np.int64)])
    apart = view_of[owners] != 0
    starts = np.where(apart, 0, offsets).astype(np.uint64)
    return PagePlan(
        pointers=flat.pointers[owners] + starts,
        lengths=np.concatenate([lengths, chunks.nbytes[packed]]).astype(np.uint64),
        part_views=view_of[owners],
        part_offsets=np.where(apart, offsets, 0).astype(np.uint64),
        views=views,
        parts_of_page=np.concatenate([np.ones(len(first_owners) - len(packed_counts), np.int64), packed_counts]).astype(
            np.uint32
        ),
        item_sizes=flat.item_sizes[first_owners],
        floating=flat.floating[first_owners].astype(np.uint8),
        packed=(np.arange(len(first_owners)) >= len(first_owners) - len(packed_counts)).astype(np.uint8),
        rows=rows,
        chunks=chunks,
        owners=owners,
        starts=starts,
        devices=flat.devices[owners],
        sizes=(page_bytes, pack_below_bytes),
    )


def _skips(chunks: ChunkTable, large: npt.NDArray[np.int64], page_bytes: int) -> npt.NDArray[np.int64]:
    """How far into a page of the whole tensor each large chunk begins.

    Rows of a larger tensor lie on the tensor's pages, so that these stay the same when it is cut into other rows. A
    whole tensor begins with a page, and so does a part that is not contiguous in it.
    """
    skips = np.zeros(len(large), np.int64)
    within = np.flatnonzero(chunks.ndims[large])
    begins = chunks.dims[chunks.dims_at[large[within]] + chunks.ndims[large[within]]]
    within = within[begins > 0]
    ndims = chunks.ndims[large[within]]
    for ndim in np.flatnonzero(np.bincount(ndims)).tolist():  # np.unique would import much when it is first called
        which = within[ndims == ndim]
        dims = chunks.dims[chunks.dims_at[large[which], None] + np.arange(3 * ndim)]
        shape, offsets, sizes = np.split(dims, 3, axis=1)
        row_bytes = chunks.nbytes[large[which]] // sizes[:, 0]
        rows = (shape[:, 1:] == sizes[:, 1:]).all(axis=1)
        skips[which[rows]] = (offsets[:, 0] * row_bytes % page_bytes)[rows]
    return skips


def _views(flat: FlatState) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """The number of each chunk's view, 0 where its bytes lie together; and the views."""
    numbers = np.zeros(len(flat.chunks), np.uint32)
    views: list[int] = []
    for number, (chunk, strides) in enumerate(sorted(flat.strides.items()), 1):
        sizes = flat.chunks.info(chunk).sizes
        element_bytes = int(flat.chunks.nbytes[chunk]) // prod(sizes)  # of a complex number: two items
        views += (element_bytes, len(sizes), *sizes, *strides)
        numbers[chunk] = number
    return numbers, np.array(views, np.int64)


def _pack(
    rows: npt.NDArray[np.void], chunks: ChunkTable, pack_below_bytes: int, packed_bytes: int, first_page: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Puts small chunks of one dtype back to back into packed pages: the chunks in order, and how many a page has."""
    small = np.flatnonzero((chunks.nbytes > 0) & (chunks.nbytes < pack_below_bytes))
    small = small[np.argsort(chunks.dtypes[small], kind="stable")]
    counts: list[int] = []
    at = 0
    while at < len(small):
        dtype = chunks.dtypes[small[at]]
        end = at + int(np.searchsorted(chunks.dtypes[small[at:]], dtype, side="right"))
        ends = np.cumsum(chunks.nbytes[small[at:end]])
        start = 0
        while start < len(ends):
            held = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, held + packed_bytes, side="right")), start + 1)
            counts.append(stop - start)
            start = stop
        at = end
    pages = np.array(counts, np.int64)
    # Where a chunk begins: what stands before it in its page.
    before = np.cumsum(chunks.nbytes[small]) - chunks.nbytes[small]
    begins = before[np.cumsum(pages) - pages]
    rows["flags"][small], rows["pages"][small] = CHUNK_PACKED, 1
    rows["first_page"][small] = np.repeat(first_page + np.arange(len(pages)), pages)
    rows["page_offset"][small] = before - np.repeat(begins, pages)
    return small, pages
