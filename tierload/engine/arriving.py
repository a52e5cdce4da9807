"""Tensors that arrive in the background: who fetches them, who waits for them, and what happens when they are there."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.engine.accelerators import present, streams
from tierload.engine.loading import Filling, Source, batches, devices_of
from tierload.engine.pinned import PinnedPages
from tierload.errors import CorruptPage, HotStartClosed
from tierload.state import Arriving, Gate, LoadPlan
from tierload.types import Destinations

__all__ = ["Arrivals"]

_log = logging.getLogger("tierload")
_LOOK_S = 0.1  # between two looks at whether a wait is still wanted

_all: weakref.WeakSet[Arrivals] = weakref.WeakSet()


class Arrivals:
    """Units that arrive in the order of ``ranks``, the lowest first; unit ``i`` is ``units[i]``.

    A gate keeps every use of a tensor waiting until its unit is there; a damaged page is raised by the use that needs
    it, each time. A forked child reads what was not there at the fork by itself.
    """

    def __init__(
        self,
        source: Source,
        units: Sequence[Arriving],
        ranks: npt.NDArray[np.uint32],
        pages: PinnedPages,
        rank: int,
        workers: int,
    ) -> None:
        self.units = units
        self.stalled_seconds = 0.0
        self.error: BaseException | None = None
        self._source = source
        self._pages = pages
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may use a tensor while the thread that it is in opens one
        self.total = len(units)
        self._settled: set[int] = set()
        self.native = _arrivals(source, units, ranks, rank, workers)
        self._workers = workers
        self._running: dict[int, LockType] = {}  # threads by number, and what each of them holds
        self._gates: list[Gate] = []
        self._settle: Callable[[], object] = lambda: None
        self._over: Callable[[], object] = lambda: None

    def start(self, settle: Callable[[], object], over: Callable[[], object]) -> None:
        """Begins to fetch; ``settle`` is called by every worker first, and ``over`` when nothing more will arrive."""
        self._settle = settle
        self._over = over
        _all.add(self)
        for _ in range(self._workers):
            self.run(self._work)

    def gate(self) -> None:
        """Makes the uses of all tensors wait from here on."""
        self._gates = [Gate(unit.tensors, self._waiter(number), self.end) for number, unit in enumerate(self.units)]
        for gate in self._gates:
            gate.shut()
        self.run(self._watch)

    def run(self, work: Callable[[], None]) -> None:
        """Has a thread do this. Unlike a ``threading.Thread`` it is not waited for until it runs, which, as those who
        start last and have the lowest priority, is milliseconds where others compute."""
        running = allocate_lock()
        running.acquire()

        def run() -> None:
            try:
                work()
            finally:
                running.release()

        self._running[start_new_thread(run, ())] = running

    def _waiter(self, unit: int) -> Callable[[], None]:
        def wait() -> None:
            self.wait(unit)

        return wait

    @property
    def ready(self) -> bool:
        """Whether all of them are there."""
        return len(self._settled) == self.total

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked process, which has none of the threads, and locks that may be held by nobody."""
        return os.getpid() != self._owner

    def is_ready(self, unit: int) -> bool:
        """Whether one is there."""
        return unit in self._settled

    @property
    def arrived_units(self) -> int:
        """How many are there."""
        return len(self._settled)

    def wait(self, unit: int, timeout: float | None = None) -> bool:
        """Waits for a unit, which is fetched next; whether it is there within ``timeout`` seconds.

        Raises:
            CorruptPage: A page of it is damaged.
        """
        if unit in self._settled:
            return True
        if self.elsewhere:
            self._read_here(unit)
            return True
        start = time.perf_counter()
        try:
            if not self._arrive(unit, timeout):
                return False
        finally:
            self.stalled_seconds += time.perf_counter() - start
        self._open(unit)
        return True

    def ask_for(self, units: Sequence[int]) -> None:
        """Has several units fetched next, beside one another."""
        if not self.elsewhere:
            for unit in units:
                self.native.demand(unit)

    def wait_for_whole(self, units: Sequence[int]) -> None:
        """Waits for all of several units that are not damaged."""
        for unit in units:
            with suppress(OSError, RuntimeError, MemoryError):  # whoever uses it is told
                self.wait(unit)

    def _arrive(self, unit: int, timeout: float | None) -> bool:
        end = None if timeout is None else time.perf_counter() + timeout
        self.native.demand(unit)
        while True:
            left = _LOOK_S if end is None else min(_LOOK_S, max(end - time.perf_counter(), 0))
            try:
                if self.native.wait(unit, left):
                    return True
            except CorruptPage as error:
                raise self._located(unit, error) from None
            if self.native.over and not self.native.arrived(unit):
                raise self._ended(unit)
            if end is not None and time.perf_counter() >= end:
                return False

    def stop(self) -> None:
        """Has nothing more fetched. A use of what is not there raises."""
        if not self.elsewhere:
            self.native.stop()
            self.end()

    def end(self) -> None:
        """Waits until its threads have ended, when nothing more will arrive."""
        if self.elsewhere:
            return
        for number, running in list(self._running.items()):
            if number != threading.get_ident():
                with running:
                    pass

    def _ended(self, unit: int) -> BaseException:
        if self.error is not None:
            return self.error
        return HotStartClosed(
            f"{self.units[unit].key!r} was not there yet when the hot start was closed; join() waits for everything"
        )

    def _located(self, unit: int, error: CorruptPage) -> CorruptPage:
        filling = Filling(self._source, self.units[unit].plan, 0)
        holder = next(
            (rank for rank in range(self._source.commit.ranks) if self._has_page(rank, error)),
            0,
        )
        return filling.located(error, holder)

    def _has_page(self, rank: int, error: CorruptPage) -> bool:
        manifest = self._source.manifest(rank)
        rows = self._source.table(rank).pages
        return (
            error.page is not None
            and error.page < len(rows)
            and manifest.segment_path(int(rows["segment"][error.page])) == error.path
            and int(rows["offset"][error.page]) == error.offset
        )

    def _open(self, unit: int) -> None:
        with self._lock:
            if unit not in self._settled:
                self.units[unit].copy()
                self._gates[unit].open()
                self._settled.add(unit)

    def _read_here(self, unit: int) -> None:
        """In a forked child, which has the memory and none of the threads."""
        with self._lock:
            if unit not in self._settled:
                if not self.native.arrived(unit):
                    self._pages.read(self.units[unit].plan)
                self._open(unit)

    # Threads of its own

    def _work(self) -> None:
        self._settle()
        try:
            self.native.work()
        except BaseException as error:  # noqa: BLE001 - every wait raises it, and so does join()
            self.error = error
            self.native.stop()
            _log.error("a hot start of %s has failed: %s", self._source.commit.id[:12], error)

    def _watch(self) -> None:
        failed: set[int] = set()
        told: set[str] = set()  # files: of one that is missing, every tensor would be told of
        while True:
            over = self.native.over
            for unit in self.native.next(_LOOK_S).tolist():
                if self.native.arrived(unit):
                    self._open(unit)
            for unit, page, path, offset, what in self.native.failures():
                failed.add(unit)
                if path not in told:
                    told.add(path)
                    error = self._located(unit, CorruptPage(what, page=page, path=path, offset=offset))
                    _log.error(
                        "a hot start meets a damaged page, and goes on without %r: %s", self.units[unit].key, error
                    )
            if over:
                break
        if len(failed) > len(told):
            _log.error("a hot start of %s has gone without %d tensors", self._source.commit.id[:12], len(failed))
        self.end()
        self._over()
        if self.ready:
            # Whoever holds this holds the end of a story: no files, no buffers, not the model.
            self.native.release()
            self.units, self._gates = (), []
            del self._source, self._pages


def _arrivals(
    source: Source, units: Sequence[Arriving], ranks: npt.NDArray[np.uint32], rank: int, workers: int
) -> _native.Arrivals:
    """The parts of pages that units are made of, for the native core."""
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    holders: list[int] = []
    for state in (False, True):  # a chunk has one destination in a plan
        chosen = [number for number, unit in enumerate(units) if unit.state is state]
        if not chosen:
            continue
        plan, unit_of = _together([units[number].plan for number in chosen], np.array(chosen, np.uint32))
        for batch in batches(source, plan, rank):
            reads = batch.reads
            of_units = unit_of[np.searchsorted(plan.destinations.chunks, batch.chunks)][reads.owners]
            if batch.holder not in holders:
                holders.append(batch.holder)
            manifest = np.full(len(reads.pages), holders.index(batch.holder), np.uint32)
            there = batch.devices[reads.owners]
            columns.append((manifest, reads.pages, reads.offsets, of_units, reads.pointers, reads.lengths, there))
    columns = columns or [(*([np.empty(0, np.uint32)] * 4), *([np.empty(0, np.uint64)] * 2), np.empty(0, np.uint8))]
    manifests, pages, offsets, of_units, pointers, lengths, devices = (
        columns[0] if len(columns) == 1 else map(np.concatenate, zip(*columns, strict=True))
    )
    return _native.Arrivals(
        [source.manifest(holder) for holder in holders],
        manifests,
        pages,
        offsets,
        pointers,
        lengths,
        of_units,
        ranks,
        workers,
        devices,
        streams(present(devices)),
    )


def _together(plans: Sequence[LoadPlan], units: npt.NDArray[np.uint32]) -> tuple[LoadPlan, npt.NDArray[np.uint32]]:
    """One plan of several, each of one chunk; and the unit of each of its chunks."""
    chunks = np.concatenate([plan.destinations.chunks for plan in plans])
    pointers = np.concatenate([plan.destinations.pointers for plan in plans])
    devices = np.concatenate([devices_of(plan.destinations) for plan in plans])
    order = np.argsort(chunks, kind="stable")
    owners = [plan.destinations.owners for plan in plans]
    destinations = Destinations(chunks[order], pointers[order], owners, devices=devices[order])
    return LoadPlan(plans[0].chunks, destinations, (), {}, lambda: None), units[order]


def _forked() -> None:
    for arrivals in list(_all):
        arrivals._lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _stop_all() -> None:
    for arrivals in list(_all):  # no thread may come back into an interpreter that has ended
        arrivals.stop()
