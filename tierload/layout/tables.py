"""A manifest's tables for the other direction: which chunks there are, and which parts of which pages hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

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
        rows = self.rows[destinations.chunks]
        counts = rows["pages"].astype(np.int64)
        owners = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        pages = rows["first_page"][owners] + within
        packed = (rows["flags"][owners] & CHUNK_PACKED) != 0
        raw_lengths = self.pages["raw_length"].astype(np.int64)[pages]
        lengths = np.where(packed, rows["bytes"][owners].astype(np.int64), raw_lengths)
        before = np.cumsum(lengths) - lengths  # bytes of all that stand before, of which those of the same owner count
        begins = before[np.cumsum(counts) - counts] if len(owners) else before
        order = np.argsort(pages, kind="stable")
        return ReadPlan(
            pages=pages[order].astype(np.uint32),
            offsets=np.where(packed, rows["page_offset"][owners], 0)[order].astype(np.uint32),
            pointers=(destinations.pointers[owners] + (before - begins[owners]).astype(np.uint64))[order],
            lengths=lengths[order].astype(np.uint64),
            owners=owners[order].astype(np.uint32),
        )


def _column(field: npt.NDArray[Any], dtype: type[Any]) -> npt.NDArray[Any]:
    """A field of the rows by itself."""
    return np.ascontiguousarray(field).astype(dtype)
