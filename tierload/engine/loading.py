"""A load: open the manifests → plan where bytes go → read, check and decode → hand out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.engine.accelerators import present, streams
from tierload.engine.direct import read_pages
from tierload.errors import CorruptPage
from tierload.layout import ManifestTable, ReadPlan
from tierload.plan import LocalBox, copies, local_boxes
from tierload.state import LoadPlan, WholeState
from tierload.types import Box, BoxDestination, ChunkTable, Commit, Destinations, PartDestination

__all__ = ["Batch", "Filling", "Source", "Whole", "batches", "devices_of", "devices_of_plan", "fill", "table_of"]

_BATCH = 1 << 19  # runs of bytes that are planned at a time


def table_of(manifest: _native.Manifest) -> ManifestTable:
    """The tables of an open manifest."""
    return ManifestTable(manifest.pages, manifest.chunks, manifest.dims, manifest.keys)


class Source(Protocol):
    """A commit's shards, and which of them hold what; its state, by its document and tensors as whole ``chunks``."""

    commit: Commit
    document: bytes
    chunks: ChunkTable

    @property
    def whole(self) -> WholeState | None:
        """More of the state, where several ranks have saved it."""

    def manifest(self, rank: int) -> _native.Manifest:
        """The shard of a rank."""

    def table(self, rank: int) -> ManifestTable:
        """Its tables."""

    def pieces(self, chunk: int, box: Box) -> Iterable[tuple[int, int, Box]]:
        """The stored parts of a tensor that meet a box: whose shard, the chunk's number there, and its box."""


class Whole:
    """A commit by one rank: one shard, whose chunks are whole tensors."""

    def __init__(self, commit: Commit, manifest: _native.Manifest) -> None:
        self.commit = commit
        self._manifest = manifest
        self._table = table_of(manifest)
        self.document = manifest.state.tobytes()
        self.chunks = self._table.chunks
        self.whole = None

    def manifest(self, rank: int) -> _native.Manifest:
        """The only one."""
        return self._manifest

    def table(self, rank: int) -> ManifestTable:
        """The only one."""
        return self._table

    def pieces(self, chunk: int, box: Box) -> Iterator[tuple[int, int, Box]]:
        """All of the chunk."""
        if 0 not in box.sizes:
            shape = self._table.chunks.info(chunk).sizes
            yield 0, chunk, Box((0,) * len(shape), shape)


def fill(source: Source, plan: LoadPlan, threads: int, rank: int, direct: str | None = None) -> None:
    """Reads every destination of a plan and verifies every page that this touches; ``rank`` is who loads. ``direct`` is
    the store's path where raw pages go past the processor into accelerators' memory.

    Raises:
        CorruptPage: A page is damaged. It names the commit, key, page, file and offset, and which keys of the target
            had been overwritten by then.
    """
    filling = Filling(source, plan, threads, direct)
    try:
        for batch in batches(source, plan, rank):
            filling.read(batch.holder, batch.reads, batch.chunks, batch.devices)
    except CorruptPage as error:
        filling.tell_overwritten(error)
        raise


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts of pages of one shard that are read at a time. The owner ``i`` of a part is a destination in chunk
    ``chunks[i]`` of the plan, in the memory of accelerator ``devices[i]``. ``again`` plans the same ``reads`` anew, for
    whoever cannot keep them."""

    holder: int
    reads: ReadPlan
    chunks: npt.NDArray[np.int64]
    devices: npt.NDArray[np.uint8]
    again: Callable[[], ReadPlan]


def batches(source: Source, plan: LoadPlan, rank: int) -> Iterator[Batch]:
    """What ``rank`` reads to fill a plan, in the order of chunks as far as that can be: always the same batches."""
    wanted = [*plan.destinations.parts]
    if isinstance(source, Whole):
        table, destinations = source.table(0), plan.destinations
        if len(destinations):
            reads = table.plan_reads(destinations)
            again = partial(table.plan_reads, destinations)
            yield Batch(0, reads, destinations.chunks, devices_of(destinations), again)
    else:
        wanted += [_of_chunk(plan, *destination) for destination in _each(plan)]
    wanted.sort(key=lambda one: one.chunk)
    by_holder: defaultdict[int, _Runs] = defaultdict(_Runs)
    planned = 0
    for piece in _pieces(source, wanted, rank):
        runs = by_holder[piece.holder]
        planned += runs.add(piece)
        if planned >= _BATCH:
            largest = max(by_holder, key=lambda holder: by_holder[holder].count)
            planned -= by_holder[largest].count
            yield _batch(source, largest, by_holder.pop(largest))
    for holder, runs in sorted(by_holder.items()):
        yield _batch(source, holder, runs)


def _each(plan: LoadPlan) -> Iterator[tuple[int, int, int]]:
    to = plan.destinations
    return zip(to.chunks.tolist(), to.pointers.tolist(), devices_of(to).tolist(), strict=True)


def devices_of_plan(plan: LoadPlan) -> list[int]:
    """The accelerators that a load fills memory of."""
    found = {part.device for part in plan.destinations.parts} | set(devices_of(plan.destinations).tolist())
    return sorted(found - {0})


def devices_of(to: Destinations) -> npt.NDArray[np.uint8]:
    """The accelerator of each destination."""
    return np.zeros(len(to), np.uint8) if to.devices is None else to.devices


def _of_chunk(plan: LoadPlan, chunk: int, pointer: int, device: int) -> BoxDestination:
    """Memory for all of a chunk."""
    info = plan.chunks.info(chunk)
    size = item_bytes = info.nbytes // max(int(np.prod(info.sizes, dtype=np.int64)), 1)
    strides = []
    for count in reversed(info.sizes):
        strides.append(size)
        size *= count
    whole = Box((0,) * len(info.sizes), info.sizes)
    return BoxDestination(chunk, whole, pointer, tuple(reversed(strides)), item_bytes, plan.destinations.owners, device)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What chunk ``number`` of a shard, which is the box ``stored`` of a tensor, has of a box that is wanted."""

    holder: int
    number: int
    stored: Box
    box: LocalBox
    wanted: BoxDestination | PartDestination

    def runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Offsets in the chunk, addresses and lengths."""
        sources, targets, lengths = copies(self.stored, self.box, self.wanted.strides, self.wanted.item_bytes)
        return sources, targets + self.wanted.pointer, lengths


def _pieces(source: Source, wanted: Iterable[BoxDestination | PartDestination], rank: int) -> Iterator[_Piece]:
    """Boxes of tensors, wherever and in what parts they are stored."""
    for one in wanted:
        if isinstance(one, PartDestination):
            boxes: Iterable[LocalBox] = local_boxes(one.sharded.shape, one.sharded.layout, rank)
        else:
            boxes = [LocalBox(one.box, (0,) * len(one.box.sizes))]
        for box in (part for whole in boxes for part in _rows_of(whole)):
            for holder, number, stored in source.pieces(one.chunk, box.box):
                yield _Piece(holder, number, stored, box, one)


def _rows_of(whole: LocalBox) -> Iterator[LocalBox]:
    """A box in blocks of rows, none of which has more runs of bytes than a batch."""
    sizes = whole.box.sizes
    rows = max(_BATCH // max(prod(sizes[1:-1]), 1), 1)
    if len(sizes) < 2 or sizes[0] <= rows:
        yield whole
        return
    offsets, at = whole.box.offsets, whole.at
    for begin in range(0, sizes[0], rows):
        block = Box((offsets[0] + begin, *offsets[1:]), (min(rows, sizes[0] - begin), *sizes[1:]))
        yield LocalBox(block, (at[0] + begin, *at[1:]))


@dataclass(slots=True)
class _Runs:
    """Runs of bytes to be read from one shard: those of pieces."""

    pieces: list[_Piece] = field(default_factory=list)
    runs: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = field(default_factory=list)
    count: int = 0

    def add(self, piece: _Piece) -> int:
        """Takes a piece in; returns how many runs it has."""
        runs = piece.runs()
        self.pieces.append(piece)
        self.runs.append(runs)
        self.count += len(runs[0])
        return len(runs[0])


def _batch(source: Source, holder: int, runs: _Runs) -> Batch:
    table, pieces = source.table(holder), runs.pieces
    reads = _planned(table, pieces, runs.runs)
    chunks = np.array([piece.wanted.chunk for piece in pieces], np.int64)
    devices = np.array([piece.wanted.device for piece in pieces], np.uint8)
    return Batch(holder, reads, chunks, devices, lambda: _planned(table, pieces, [piece.runs() for piece in pieces]))


def _planned(
    table: ManifestTable,
    pieces: Sequence[_Piece],
    runs: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]],
) -> ReadPlan:
    counts = [len(sources) for sources, _, _ in runs]
    sources, addresses, lengths = (np.concatenate(column) for column in zip(*runs, strict=True))
    owners = np.repeat(np.arange(len(pieces), dtype=np.uint32), counts)
    numbers = np.array([piece.number for piece in pieces], np.int64)[owners]
    return table.plan_parts(numbers, sources, addresses.view(np.uint64), lengths, owners)


class Filling:
    """A load under way: what was read, and which chunks of the plan something was written for."""

    def __init__(self, source: Source, plan: LoadPlan, threads: int, direct: str | None = None) -> None:
        self._direct = direct
        self.source = source
        self.plan = plan
        self.threads = threads
        self.progress = _native.Progress()
        self._written: set[int] = set()

    def read(self, holder: int, reads: ReadPlan, chunks: npt.NDArray[np.int64], devices: npt.NDArray[np.uint8]) -> None:
        """Reads parts of pages of one shard into memory; ``chunks`` and ``devices`` are as in ``Batch``.

        Raises:
            CorruptPage: A page is damaged; what was overwritten is to be told (``tell_overwritten``).
        """
        touched = np.zeros(len(reads.pages), np.uint8)
        there = devices[reads.owners]
        landed = None
        try:
            if self._direct is not None and there.any():
                parts = self.source.manifest(holder), self.source.table(holder), reads, there
                landed = read_pages(self._direct, *parts)
            self.source.manifest(holder).read(
                pages=reads.pages,
                offsets=reads.offsets,
                pointers=reads.pointers,
                lengths=reads.lengths,
                threads=self.threads,
                touched=touched,
                progress=self.progress,
                devices=there,
                streams=streams(present(there)),
                landed=landed,
            )
        except CorruptPage as error:
            self.written(chunks, reads.owners[touched != 0])
            raise self.located(error, holder) from None
        self.written(chunks, reads.owners)

    def written(self, chunks: npt.NDArray[np.int64], owners: npt.NDArray[np.uint32]) -> None:
        """Something was written for these owners of a batch, whose ``chunks`` these are."""
        self._written.update(np.unique(chunks[np.unique(owners)]).tolist())

    def located(self, error: CorruptPage, holder: int) -> CorruptPage:
        """The error with what the page is of."""
        table, commit = self.source.table(holder), self.source.commit
        keys = [table.chunks.key(number) for number in table.page_owner(error.page)]
        if isinstance(self.source, Whole):
            numbers: Iterable[int] = table.page_owner(error.page)
        else:
            numbers = [number for number in range(len(self.plan.chunks)) if self.plan.chunks.key(number) in keys]
        own = [number for number in numbers if number in self.plan.destinations.chunks]
        wanted = {key for number in own or numbers for key in self.plan.keys_of(number)}
        key = min(wanted) if wanted else (keys[0] if keys else "")
        others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        shard = "" if isinstance(self.source, Whole) else f", in the shard of rank {holder}"
        return CorruptPage(
            f"commit {commit.id[:12]} (step {commit.step}), key {key!r}{others}{shard}: {error}. "
            f"Other commits may hold a whole copy: `tierload verify --full` says which; then load or roll back to one",
            commit=commit.id,
            key=key,
            page=error.page,
            path=error.path,
            offset=error.offset,
        )

    def tell_overwritten(self, error: CorruptPage) -> None:
        """Adds which keys of the target had been overwritten, here, when a page was found to be damaged."""
        changed = self._written & self.plan.in_place
        error.overwritten = tuple(sorted({key for chunk in changed for key in self.plan.keys_of(chunk)}))
        if error.overwritten:
            error.args = (f"{error}. Of the target, these keys had been overwritten: {', '.join(error.overwritten)}",)
