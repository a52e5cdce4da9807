"""A load by several ranks of one node: a page that more than one of them needs is read, verified and decoded by one,
and handed over in memory that they share.

Rounds (tierload.ranks): what each needs → the memory → one a wave of pages → the end. A wave fills one half of the
memory while slower ranks still copy the other one out. Errors travel with the rounds, so nobody waits for nothing.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.engine.loading import Filling, Source, batches
from tierload.engine.memory import available_bytes
from tierload.errors import CorruptPage, RanksDisagree
from tierload.layout import ReadPlan
from tierload.ranks import Channel
from tierload.state import LoadPlan

__all__ = ["fill_together", "refuse"]

_log = logging.getLogger("tierload")

_SHARED_BYTES = 64 << 20  # of a node; of what is available, at most a quarter
_KEPT_PARTS = 1 << 20  # parts of pages that are kept as they were planned; the others are planned anew for each wave
_FIRST_ROUND = "planning the load"

_Pages = dict[int, npt.NDArray[np.bool_]]
"""For each shard, which of its pages."""


def fill_together(channel: Channel, source: Source, plan: LoadPlan, threads: int, rank: int) -> None:
    """Reads every destination of a plan, as ``loading.fill`` does, with all ranks of ``channel``, which are on one
    node; ``rank`` is this one's number in the job.

    Raises:
        CorruptPage, TierloadError: What went wrong first, on whatever rank.
        RanksDisagree: They load different commits.
        RankLost: One has ended, or gives no sign of life.
    """
    filling = Filling(source, plan, threads)
    try:
        _Sharing(channel, filling, rank).run()
    except CorruptPage as error:
        filling.tell_overwritten(error)
        raise


def refuse(channel: Channel, error: BaseException) -> None:
    """Tells the others that this rank does not even have a plan.

    Raises:
        BaseException: ``error``, or what went wrong before it on another rank.
    """
    channel.begin()
    channel.round(_FIRST_ROUND, error, _nothing)


@dataclass(slots=True)
class _Held:
    """A batch, and the pages that it has parts of. ``planned`` gives the parts, kept or planned anew."""

    holder: int
    chunks: npt.NDArray[np.int64]
    devices: npt.NDArray[np.uint8]
    pages: npt.NDArray[np.uint32]
    planned: Callable[[], ReadPlan]

    @property
    def alone(self) -> bool:
        """Whether it is read by itself: into accelerators' memory, through pinned memory of this rank's own."""
        return bool(self.devices.any())


@dataclass(frozen=True, slots=True)
class _Wave:
    """Pages of one shard, ascending, that lie in the shared memory one after the other from slot ``first`` on."""

    holder: int
    pages: npt.NDArray[np.uint32]
    first: int


class _Sharing:
    def __init__(self, channel: Channel, filling: Filling, rank: int) -> None:
        self._channel = channel
        self._filling = filling
        self._source = filling.source
        self._rank = rank
        self._slot_bytes = filling.source.manifest(0).page_bytes
        self._held: list[_Held] = []
        self._shared: _Pages = {}
        self._file = -1  # on the channel's rank 0
        self._memory: mmap.mmap | None = None

    def run(self) -> None:
        self._channel.begin()
        try:
            answer = self._channel.round(_FIRST_ROUND, _result_or_error(self._needs), self._decide)
            with self._channel.working("reading", lambda: self._filling.progress.bytes):
                slots = self._agree(json.loads(answer.partition(b"\n")[0]), answer)
                self._read(slots)
        finally:
            if self._memory is not None:
                self._memory.close()
            if self._file >= 0:
                os.close(self._file)

    # Who needs what

    def _needs(self) -> bytes:
        """This rank's commit, and the pages that it needs of each shard."""
        needs: _Pages = {}
        kept = 0
        for batch in batches(self._source, self._filling.plan, self._rank):
            pages = np.unique(batch.reads.pages)
            table = self._source.table(batch.holder).pages
            wanted = needs.setdefault(batch.holder, np.zeros(len(table), np.bool_))
            if not batch.devices.any():
                wanted[pages] = True
            keep = kept + len(batch.reads.pages) <= _KEPT_PARTS
            kept += len(batch.reads.pages) if keep else 0
            planned = partial(_same, batch.reads) if keep else batch.again
            self._held.append(_Held(batch.holder, batch.chunks, batch.devices, pages, planned))
        for holder, wanted in needs.items():  # what does not fit a slot is read by whoever needs it
            wanted &= self._source.table(holder).pages["raw_length"] <= self._slot_bytes
        return _packed({"commit": self._source.commit.id}, needs)

    def _decide(self, parts: Sequence[bytes]) -> bytes:
        """On rank 0: which pages are shared, and the memory for them."""
        counts: dict[int, npt.NDArray[np.uint8]] = {}
        commits: list[str] = []
        for part in parts:
            head, needs = _unpacked(part)
            commits.append(str(head["commit"]))
            for holder, wanted in needs.items():
                count = counts.setdefault(holder, np.zeros(len(wanted), np.uint8))
                count += (wanted & (count < 2)).astype(np.uint8)
        if different := [(n, commit) for n, commit in enumerate(commits) if commit != commits[0]]:
            names = self._channel.members
            raise RanksDisagree(
                "the ranks load different commits: say which one, by id or step",
                differences=[
                    f"rank {names[n]} loads {id[:12]}, rank {names[0]} {commits[0][:12]}" for n, id in different
                ],
            )
        shared = {holder: count > 1 for holder, count in counts.items() if (count > 1).any()}
        total = sum(int(np.count_nonzero(pages)) for pages in shared.values())
        budget = min(_SHARED_BYTES, available_bytes() // 4)
        slots = min(total, budget // (2 * self._slot_bytes))
        if total and not slots:
            _log.debug("each rank reads by itself: %d bytes of memory are too few to share pages in", budget)
        if not slots:
            return _packed({"slots": 0}, {})
        # Without a name, so that nothing stays of it whoever is killed; others open it by the number of this process.
        self._file = os.memfd_create("tierload-pages")
        os.ftruncate(self._file, self._half(slots) * (1 if slots == total else 2))
        return _packed({"slots": slots, "process": os.getpid(), "file": self._file}, shared)

    def _half(self, slots: int) -> int:
        return slots * self._slot_bytes

    # The memory

    def _agree(self, head: dict[str, int], answer: bytes) -> int:
        """Maps the memory, on all ranks or on none; returns how many pages a half of it has."""
        if not head["slots"]:
            return 0
        path = f"/proc/{head['process']}/fd/{head['file']}"
        if self._channel.round("sharing memory", _result_or_error(lambda: self._map(path)), self._reserve) != b"+":
            _log.debug("each rank reads by itself: not all could map the same memory")
            return 0
        self._shared = _unpacked(answer)[1]
        return head["slots"]

    def _map(self, path: str) -> bytes:
        """Says which file it is that was mapped: another process may have that number here."""
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            return str(error).encode()
        try:
            status = os.fstat(file)
            self._memory = mmap.mmap(file, status.st_size)
        except (OSError, ValueError) as error:
            return str(error).encode()
        finally:
            os.close(file)
        return f"{status.st_dev} {status.st_ino}".encode()

    def _reserve(self, parts: Sequence[bytes]) -> bytes:
        """On rank 0, when all have tried."""
        status = os.fstat(self._file)
        if any(part != f"{status.st_dev} {status.st_ino}".encode() for part in parts):
            return b"-"
        try:
            os.posix_fallocate(self._file, 0, status.st_size)
        except OSError as error:  # better here than as SIGBUS
            _log.debug("no memory for pages that ranks share: %s", error)
            return b"-"
        return b"+"

    # Reading

    def _read(self, slots: int) -> None:
        channel = self._channel
        failure = _error_of(self._read_alone)
        for number, waves in enumerate(self._waves(slots)):
            address = self._address + number % 2 * self._half(slots)
            failure = failure or _error_of(partial(self._read_wave, waves, address))
            channel.round("reading", failure or b"", _nothing)
            failure = _error_of(partial(self._copy_wave, waves, address))
        channel.round("loading", failure or b"", _nothing)

    @property
    def _address(self) -> int:
        assert self._memory is not None
        return int(np.frombuffer(self._memory, np.uint8).ctypes.data)

    def _read_alone(self) -> None:
        """What nobody else needs."""
        for held in self._held:
            shared = self._shared.get(held.holder)
            if shared is None or held.alone:
                self._filling.read(held.holder, held.planned(), held.chunks, held.devices)
            elif not shared[held.pages].all():
                reads = held.planned()
                self._filling.read(held.holder, _some(reads, ~shared[reads.pages]), held.chunks, held.devices)

    def _waves(self, slots: int) -> Iterator[list[_Wave]]:
        """What the memory is filled with, one time after the other: the same on every rank."""
        current: list[_Wave] = []
        free = slots
        for holder in sorted(self._shared):
            pages = np.flatnonzero(self._shared[holder]).astype(np.uint32)
            while len(pages):
                current.append(_Wave(holder, pages[:free], slots - free))
                free -= len(current[-1].pages)
                pages = pages[len(current[-1].pages) :]
                if not free:
                    yield current
                    current, free = [], slots
        if current:
            yield current

    def _read_wave(self, waves: Sequence[_Wave], address: int) -> None:
        """This rank's run of the pages of a wave, whether or not it needs them itself."""
        total = waves[-1].first + len(waves[-1].pages)
        begin, end = (total * number // self._channel.ranks for number in (self._channel.rank, self._channel.rank + 1))
        for wave in waves:
            low, high = max(begin - wave.first, 0), min(end - wave.first, len(wave.pages))
            if low >= high:
                continue
            pages = wave.pages[low:high]
            slots = np.arange(wave.first + low, wave.first + high, dtype=np.uint64)
            try:
                self._source.manifest(wave.holder).read(
                    pages=pages,
                    offsets=np.zeros(len(pages), np.uint32),
                    pointers=np.uint64(address) + slots * np.uint64(self._slot_bytes),
                    lengths=self._source.table(wave.holder).pages["raw_length"][pages].astype(np.uint64),
                    threads=self._filling.threads,
                    touched=np.zeros(len(pages), np.uint8),
                    progress=self._filling.progress,
                )
            except CorruptPage as error:
                raise self._filling.located(error, wave.holder) from None

    def _copy_wave(self, waves: Sequence[_Wave], address: int) -> None:
        """Out of the shared memory to where this rank needs it."""
        by_holder: defaultdict[int, list[_Held]] = defaultdict(list)
        for held in self._held:
            by_holder[held.holder].append(held)
        for wave in waves:
            first, last = wave.pages[0], wave.pages[-1]
            for held in by_holder[wave.holder]:
                begin, end = np.searchsorted(held.pages, (first, last + 1))
                if begin == end or held.alone:
                    continue
                reads = held.planned()
                begin, end = np.searchsorted(reads.pages, (first, last + 1))
                reads = _some(reads, slice(begin, end))
                slots = np.searchsorted(wave.pages, reads.pages)
                here = wave.pages[slots] == reads.pages
                if not here.all():
                    reads, slots = _some(reads, here), slots[here]
                self._filling.written(held.chunks, reads.owners)
                places = address + (wave.first + slots) * self._slot_bytes + reads.offsets
                _native.copy_runs(
                    sources=places.astype(np.uint64),
                    targets=reads.pointers,
                    lengths=reads.lengths,
                    threads=self._filling.threads,
                )


def _same(reads: ReadPlan) -> ReadPlan:
    return reads


def _some(reads: ReadPlan, which: slice | npt.NDArray[np.bool_]) -> ReadPlan:
    return ReadPlan(
        pages=reads.pages[which],
        offsets=reads.offsets[which],
        pointers=reads.pointers[which],
        lengths=reads.lengths[which],
        owners=reads.owners[which],
    )


def _packed(head: dict[str, object], pages: _Pages) -> bytes:
    """As one message: a line of JSON and bits."""
    line = json.dumps(head | {"shards": [[holder, len(pages[holder])] for holder in pages]})
    return line.encode() + b"\n" + zlib.compress(b"".join(np.packbits(bits).tobytes() for bits in pages.values()), 1)


def _unpacked(message: bytes) -> tuple[dict[str, object], _Pages]:
    line, _, rest = message.partition(b"\n")
    head, bits = json.loads(line), np.frombuffer(zlib.decompress(rest), np.uint8)
    pages: _Pages = {}
    at = 0
    for holder, count in head["shards"]:
        pages[holder] = np.unpackbits(bits[at:], count=count).astype(np.bool_)
        at += -(-count // 8)
    return head, pages


def _result_or_error(action: Callable[[], bytes]) -> bytes | BaseException:
    """The round that follows raises it, on every rank."""
    try:
        return action()
    except BaseException as error:  # noqa: BLE001 - that round raises it
        return error


def _error_of(action: Callable[[], None]) -> BaseException | None:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - likewise
        return error
    return None


def _nothing(parts: Sequence[bytes]) -> bytes:
    return b""
