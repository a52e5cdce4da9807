"""A manifest's tables for the other direction: which chunks there are, and which parts of which pages hold them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tierload.errors import CorruptStore
from tierload.layout.rows import CHUNK_PACKED, CHUNK_ROW, PAGE_ROW, SEGMENT_ROW
from tierload.types import ChunkInfo, ChunkTable, Destinations

__all__ = ["ManifestTable", "ReadPlan", "segment_sizes"]

_DTYPE_MAX = 255  # every code that a release may have; the column has more room, which is not used


def segment_sizes(segments: npt.NDArray[np.uint8]) -> list[int]:
    """The sizes in bytes of the files that a manifest's section of segments lists."""
    return [int(size) for size in segments.view(SEGMENT_ROW)["size"]]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Parts of pages to be read, sorted by page; part ``i`` belongs to destination ``owners[i]``."""

    pages: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint32]
    pointers: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    owners: npt.NDArray[np.uint32]


class ManifestTable:
    """Typed views of the byte sections of an open manifest (``_native.Manifest``)."""

    def __init__(
        self,
        pages: npt.NDArray[np.uint8],
        chunks: npt.NDArray[np.uint8],
        dims: npt.NDArray[np.uint8],
        keys: npt.NDArray[np.uint8],
    ) -> None:
        self.pages = pages.view(PAGE_ROW)
        self.rows = chunks.view(CHUNK_ROW)
        self._dims = dims.view(np.int64)
        self._keys = keys

    @cached_property
    def chunks(self) -> ChunkTable:
        """All chunks."""
        return self._table(slice(None))

    def info(self, number: int) -> ChunkInfo:
        """One chunk, without a look at the others."""
        (info,) = self._table(slice(number, number + 1)).infos()
        return replace(info, number=number)

    def _table(self, which: slice) -> ChunkTable:
        rows = self.rows[which]
        return ChunkTable(
            keys=self._keys.tobytes(),
            key_offsets=_column(rows["key_offset"], np.int64),
            key_lengths=_column(rows["key_length"], np.int64),
            dtypes=_column(np.minimum(rows["dtype"], _DTYPE_MAX), np.uint8),
            ndims=_column(rows["ndim"], np.uint8),
            dims_at=_column(rows["dims"], np.int64),
            dims=self._dims,
            nbytes=_column(rows["bytes"], np.int64),
        )

    def page_owner(self, page: int) -> list[int]:
        """Numbers of the chunks that lie in a page."""
        first = self.rows["first_page"].astype(np.int64)
        inside = (first <= page) & (page < first + self.rows["pages"])
        return [int(number) for number in np.flatnonzero(inside)]

    def stored_bytes(self) -> int:
        """How many bytes the pages have in segments, those that other commits share too; each counted once."""
        places = self.pages[["segment", "offset", "stored_length"]]
        return int(np.unique(places)["stored_length"].sum())

    def is_packed(self, number: int) -> bool:
        """Whether a chunk shares its page with others."""
        return bool(self.rows["flags"][number] & CHUNK_PACKED)

    def raw_digests(self, number: int) -> tuple[bytes, int]:
        """What identifies a chunk's bytes: the digests of its pages, and its offset in the first one."""
        row = self.rows[number]
        first, count = int(row["first_page"]), int(row["pages"])
        return self.pages["raw_digest"][first : first + count].tobytes(), int(row["page_offset"])

    def plan_reads(self, destinations: Destinations) -> ReadPlan:
        """Which parts of which pages fill the destinations."""
        chunks = destinations.chunks
        nothing, lengths = np.zeros(len(chunks), np.int64), self.rows["bytes"][chunks].astype(np.int64)
        owners = np.arange(len(chunks), dtype=np.uint32)
        return self.plan_parts(chunks, nothing, destinations.pointers, lengths, owners)

    def plan_parts(
        self,
        chunks: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        pointers: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.int64],
        owners: npt.NDArray[np.uint32],
    ) -> ReadPlan:
        """Which parts of which pages fill memory from parts of chunks: ``lengths[i]`` bytes from byte ``sources[i]`` of
        chunk ``chunks[i]`` go to ``pointers[i]``, for destination ``owners[i]``.

        Raises:
            CorruptStore: A part is not within its chunk: the manifest's sizes and bytes contradict each other.
        """
        sizes = self.rows["bytes"][chunks].astype(np.int64)
        if np.any((sources < 0) | (lengths < 0) | (sources > sizes - lengths)):
            raise CorruptStore("the manifest lists a chunk with fewer bytes than its sizes say")
        # All pages end to end are one line of bytes, in which a chunk is contiguous, packed or not.
        begins = self._page_begins[self.rows["first_page"][chunks]] + self.rows["page_offset"][chunks] + sources
        first = np.searchsorted(self._page_begins, begins, side="right") - 1
        counts = np.searchsorted(self._page_begins, begins + lengths, side="left") - first
        counts[lengths == 0] = 0
        which = np.repeat(np.arange(len(chunks)), counts)
        pages = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        order = np.argsort(pages, kind="stable")
        which, pages = which[order], pages[order]
        page_begins, part_begins = self._page_begins[pages], begins[which]
        starts = np.maximum(page_begins, part_begins)
        return ReadPlan(
            pages=pages.astype(np.uint32),
            offsets=(starts - page_begins).astype(np.uint32),
            pointers=pointers[which] + (starts - part_begins).astype(np.uint64),
            lengths=(np.minimum(self._page_begins[pages + 1], part_begins + lengths[which]) - starts).astype(np.uint64),
            owners=owners[which],
        )

    @cached_property
    def _page_begins(self) -> npt.NDArray[np.int64]:
        """Where each page begins when all are laid end to end, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.pages["raw_length"], dtype=np.int64)])

    def pieces(self, key: str) -> list[ChunkInfo]:
        """The chunks of one key, in the order of their offsets; none where there is no such key."""
        wanted, numbers = key.encode("utf-8", "surrogatepass"), range(len(self.rows))
        begin = bisect_left(numbers, wanted, key=self._key)
        end = bisect_right(numbers, wanted, lo=begin, key=self._key)
        infos = self._table(slice(begin, end)).infos()
        return [replace(info, number=number) for number, info in enumerate(infos, begin)]

    def _key(self, number: int) -> bytes:
        """A chunk's key as it is stored."""
        start, length = int(self.rows["key_offset"][number]), int(self.rows["key_length"][number])
        return self._keys[start : start + length].tobytes()


def _column(field: npt.NDArray[Any], dtype: type[Any]) -> npt.NDArray[Any]:
    """A field of the rows by itself."""
    return np.ascontiguousarray(field).astype(dtype)
