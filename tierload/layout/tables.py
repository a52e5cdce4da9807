"""A manifest's tables for the other direction: which chunks there are, and which parts of which pages hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierload.errors import CorruptStore
from tierload.layout.rows import CHUNK_PACKED, CHUNK_ROW, PAGE_ROW, SEGMENT_ROW
from tierload.types import ChunkInfo, Destination

__all__ = ["ManifestTable", "ReadPlan", "segment_sizes"]


def segment_sizes(segments: npt.NDArray[np.uint8]) -> list[int]:
    """The sizes in bytes of the files that a manifest's section of segments lists."""
    return [int(size) for size in segments.view(SEGMENT_ROW)["size"]]


def _text(key: bytes) -> str:
    try:
        return key.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise CorruptStore(f"a key in the manifest is no UTF-8: {key[:40]!r}") from None


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
        self.chunks = chunks.view(CHUNK_ROW)
        self._dims = dims.view(np.int64)
        self._keys = keys.tobytes()

    def key(self, number: int) -> str:
        """The key of one chunk."""
        row = self.chunks[number]
        start = int(row["key_offset"])
        return _text(self._keys[start : start + int(row["key_length"])])

    def infos(self) -> list[ChunkInfo]:
        """Every chunk, in row order."""
        dims = self._dims.tolist()
        out = []
        columns = ("key_offset", "key_length", "dtype", "ndim", "dims", "bytes")
        for number, (offset, length, dtype, ndim, at, nbytes) in enumerate(
            zip(*(self.chunks[name].tolist() for name in columns), strict=True)
        ):
            key = _text(self._keys[offset : offset + length])
            shape, offsets, sizes = (tuple(dims[at + i * ndim : at + (i + 1) * ndim]) for i in range(3))
            out.append(ChunkInfo(number, key, dtype, shape, offsets, sizes, nbytes))
        return out

    def page_owner(self, page: int) -> list[int]:
        """Numbers of the chunks that lie in a page."""
        first = self.chunks["first_page"].astype(np.int64)
        inside = (first <= page) & (page < first + self.chunks["pages"])
        return [int(number) for number in np.flatnonzero(inside)]

    def stored_bytes(self) -> int:
        """How many bytes the pages have in segments, those that other commits share too; each counted once."""
        places = self.pages[["segment", "offset", "stored_length"]]
        return int(np.unique(places)["stored_length"].sum())

    def is_packed(self, number: int) -> bool:
        """Whether a chunk shares its page with others."""
        return bool(self.chunks["flags"][number] & CHUNK_PACKED)

    def raw_digests(self, number: int) -> tuple[bytes, int]:
        """What identifies a chunk's bytes: the digests of its pages, and its offset in the first one."""
        row = self.chunks[number]
        first, count = int(row["first_page"]), int(row["pages"])
        return self.pages["raw_digest"][first : first + count].tobytes(), int(row["page_offset"])

    def plan_reads(self, destinations: Sequence[Destination]) -> ReadPlan:
        """Which parts of which pages fill the destinations."""
        pages: list[int] = []
        offsets: list[int] = []
        pointers: list[int] = []
        lengths: list[int] = []
        owners: list[int] = []
        raw_lengths = self.pages["raw_length"].tolist()
        columns = ("first_page", "pages", "page_offset", "flags")
        table = list(zip(*(self.chunks[name].tolist() for name in columns), strict=True))
        for owner, destination in enumerate(destinations):
            first, count, page_offset, flags = table[destination.chunk]
            if flags & CHUNK_PACKED:
                spans = [(first, page_offset, destination.nbytes)] if count else []
            else:
                spans = [(page, 0, raw_lengths[page]) for page in range(first, first + count)]
            at = destination.pointer
            for page, offset, length in spans:
                pages.append(page)
                offsets.append(offset)
                pointers.append(at)
                lengths.append(length)
                owners.append(owner)
                at += length
        order = np.argsort(np.array(pages, np.uint32), kind="stable")
        return ReadPlan(
            pages=np.array(pages, np.uint32)[order],
            offsets=np.array(offsets, np.uint32)[order],
            pointers=np.array(pointers, np.uint64)[order],
            lengths=np.array(lengths, np.uint64)[order],
            owners=np.array(owners, np.uint32)[order],
        )
