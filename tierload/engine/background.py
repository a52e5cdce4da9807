"""Saves that go on while training does: who may begin, who writes, and what happens when one fails."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tierload import _native
from tierload.engine import guards, leaving
from tierload.engine.clones import CloneMemory, Clones
from tierload.engine.live import Live
from tierload.engine.memory import Arenas
from tierload.engine.pending import PendingSave
from tierload.engine.saving import OUT_OF_SPACE, Draft, Effort
from tierload.engine.staging import Snapshot
from tierload.errors import InvalidRequest, SaveCancelled, SaveSkipped, StoreIOError, StorePoisoned, TierloadError
from tierload.settings import Settings
from tierload.types import SaveReport

__all__ = ["Background", "Writer", "copy_threads"]

_log = logging.getLogger("tierload")

_COPY_THREADS_MAX = 4  # more do not copy faster than the memory takes it
_RETRY_SECONDS = (0.5, 2.0, 8.0)  # pauses before another attempt, with on_failure="retry"
_LOOK_SECONDS = 0.2  # between two looks at what is under way


class Writer(Protocol):
    """The store, as far as a save in the background needs it. ``write`` waits for its turn."""

    path: str

    @property
    def poisoned(self) -> bool:
        """Whether nothing can be written any more before ``reopen``."""

    def write(self, draft: Draft, effort: Effort, settings: Settings) -> SaveReport:
        """Writes and commits."""

    def reopen(self) -> None:
        """Begins a new epoch after a failure that poisoned the writer."""

    def refuse_inside(self) -> None:
        """Raises where waiting for a save would never end."""

    @property
    def together(self) -> bool:
        """Whether other ranks of a job take part in every save: then each call leads to one ``write`` or ``refuse``."""

    def refuse(self, error: BaseException) -> None:
        """Tells the other ranks what keeps this one from a save that they are in; raises it, or what came before it."""


@dataclass(slots=True)
class _Job:
    pending: PendingSave
    snapshot: Snapshot
    draft: Draft
    settings: Settings
    arena: _native.Arena
    cloned: CloneMemory


class Background:
    """The saves of one store in the background, in the order of their calls.

    Two threads of its own: one writes, one looks after copies and shows how far it all is. ``skipped`` counts calls
    that ``on_busy="skip"`` left out.
    """

    def __init__(self, writer: Writer) -> None:
        self.skipped = 0
        self._writer = writer
        self._owner = os.getpid()
        self._arenas = Arenas()
        self._clones = Clones()
        self._queue: queue.SimpleQueue[PendingSave | BaseException | None] = queue.SimpleQueue()
        self._jobs: dict[PendingSave, _Job] = {}  # whoever takes one out ends it
        self._changed = threading.Condition()
        self._in_flight: list[PendingSave] = []
        self._untold: list[PendingSave] = []  # failed, and nobody was told
        self._owed = 0  # saves of which other ranks are still to be told that this one takes no part
        self._ends = False
        self._threads = [
            threading.Thread(target=self._write_all, name="tierload-write", daemon=True),
            threading.Thread(target=self._watch, name="tierload-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # For the training loop

    def begin(self, make: Callable[[], Draft], step: int | None, settings: Settings) -> PendingSave:
        """Copies what ``make`` describes, as far as it has to be copied now, and has it written beside the caller."""
        pending = PendingSave(self._writer.path, step, self.told, self.give_up, self._writer.refuse_inside)
        arena = cloned = draft = snapshot = job = None
        owes = self._writer.together  # until the other ranks will hear of this save in any case
        try:
            if not self._admit(pending, settings):
                if owes:
                    self.owe(SaveSkipped(f"{pending.describe()} was skipped"))
                return pending
            draft = make()
            # Ranks that save together look at each other's bytes on the host.
            cloned = None if owes else self._clones.take(draft.page_set, settings.device_budget_bytes)
            nbytes = draft.page_set.staging_bytes if cloned is None else draft.page_set.host_bytes
            arena = self._arenas.take(nbytes, settings.host_budget_bytes)
            if owes and arena.nbytes < nbytes:
                # What ranks write is decided when all bytes are known: there are no waves.
                self._arenas.give(arena)
                owes, arena = False, None
                self._write_here(pending, draft, settings)
                return pending
            snapshot = Snapshot(
                draft,
                arena,
                guards.guarded_memory(settings.pack_below_bytes),
                clone=None if cloned is None else self._clones.clone(draft.page_set, cloned),
                threads=copy_threads(),
                settled=pending.mark_staged,
            )
            pending.take(snapshot)
            guards.settles_later(pending)
            pending.flight = leaving.begins(pending.describe(), pending.moved, grace_seconds=settings.grace_seconds)
            self._jobs[pending] = job = _Job(pending, snapshot, draft, settings, arena, cloned or [])
            waves = not snapshot.staging.keeps_all
            if waves:  # the copy goes on only as pages are written
                self._queue.put(pending)
            snapshot.copy_now()
            owes = False
            if not waves:
                self._queue.put(pending)
        except BaseException as error:
            self._withdraw(pending, job, error)
            if owes:
                self.owe(error)
            # Whoever keeps the error keeps these frames, and with them memory that the next save may wait for.
            traceback.clear_frames(error.__traceback__)
            arena = cloned = draft = snapshot = job = None
            raise
        pending.waited += time.perf_counter() - pending.began
        if waves:
            _log.warning(
                "%s waited %.3f s and copies in waves: %s bytes do not fit into host_budget_bytes, %s",
                *(pending.describe(), pending.waited, nbytes, arena.nbytes),
            )
        return pending

    def owe(self, error: BaseException) -> None:
        """Has the other ranks told, when it is this save's turn, that this one takes no part in it."""
        with self._changed:
            self._owed += 1
        self._queue.put(error)

    def _write_here(self, pending: PendingSave, draft: Draft, settings: Settings) -> None:
        """Writes without a copy, while the caller waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight == [pending] and not self._owed)
        effort = Effort(began=pending.began, progress=pending.written, cancel=pending.cancelled)
        report = self._writer.write(draft, effort, settings)
        pending.mark_staged()
        self._end(pending)
        pending.waited += time.perf_counter() - pending.began
        pending.succeed(report)
        _log.warning(
            "%s waited %.3f s until it was durable: %s bytes do not fit into host_budget_bytes",
            *(pending.describe(), pending.waited, draft.page_set.staging_bytes),
        )

    def prepare(self, nbytes: int, settings: Settings, pages: _native.PageSet | None = None) -> None:
        """Touches the memory for the copy of so many bytes, on a thread of its own. What accelerators have of ``pages``
        is cloned once."""
        alone = pages is not None and not self._writer.together  # as in begin()
        cloned = self._clones.take(pages, settings.device_budget_bytes) if pages is not None and alone else None
        if pages is not None and cloned is not None:
            self._clones.clone(pages, cloned).wait_done(None)
            self._clones.give(cloned)
            nbytes = pages.host_bytes
        arena = self._arenas.take(nbytes, settings.host_budget_bytes)

        def touch() -> None:
            arena.prefault(copy_threads())
            self._arenas.give(arena)

        threading.Thread(target=touch, name="tierload-prefault", daemon=True).start()

    def settle(self) -> None:
        """Waits until no save is in flight."""
        if os.getpid() == self._owner:
            with self._changed:
                self._changed.wait_for(lambda: not self.busy)

    def raise_untold(self) -> None:
        """Raises what went wrong in a save whose caller has not asked."""
        with self._changed:
            untold, self._untold = self._untold, []
        failed = [pending for pending in untold if pending.flight is None or not pending.flight.said]
        if not failed:
            return
        error = failed[0].error
        assert error is not None
        for pending in failed[1:]:
            error.add_note(f"Besides, {pending.describe()} has failed: {pending.error}")
        try:
            raise error
        finally:
            for pending in failed:
                if pending.flight is not None:
                    pending.flight.told()

    def told(self, pending: PendingSave) -> None:
        """Somebody knows that this one failed."""
        with self._changed:
            self._untold = [other for other in self._untold if other is not pending]
        if pending.flight is not None:
            pending.flight.told()

    def close(self) -> None:
        """Waits for what is in flight, and ends the threads."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.busy)
            self._ends = True  # from here on, nothing begins
            self._changed.notify_all()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._clones.drop()
        self._arenas.drop()  # the store may be kept for long, and its memory is as large as a state

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._in_flight or self._owed)

    @property
    def waits_for_caller(self) -> bool:
        """Whether saves cannot go on before this thread leaves a function that it is in, below a signal handler."""
        frame = sys._getframe()
        while (above := frame.f_back) is not None:  # no list of ours: an interrupt could leave something in it
            frame = above
            if frame.f_code in _OTHERS_WAIT:
                return True
        if self._changed._is_owned():  # type: ignore[attr-defined]
            return True
        return any(pending.finishes_here for pending in list(self._in_flight))

    def in_flight(self, step: int | None) -> bool:
        """Whether a save of this step is under way."""
        return any(pending.step == step for pending in list(self._in_flight))

    def _admit(self, pending: PendingSave, settings: Settings) -> bool:
        with self._changed:
            if self._ends:
                raise InvalidRequest("the store is closed")
            if settings.on_busy != "queue" and len(self._in_flight) >= settings.max_in_flight:
                if settings.on_busy == "skip":
                    self.skipped += 1
                    error = SaveSkipped(
                        f"{pending.describe()} was skipped: {len(self._in_flight)} are in flight, which is "
                        f"max_in_flight; {self.skipped} skipped so far"
                    )
                    _log.warning("%s", error)
                    pending.skip(error)
                    return False
                self._changed.wait_for(lambda: len(self._in_flight) < settings.max_in_flight)
            self._in_flight.append(pending)
            self._changed.notify_all()  # who shows what is in flight
            return True

    def _withdraw(self, pending: PendingSave, job: _Job | None, error: BaseException) -> None:
        """The call itself has failed, or was interrupted."""
        pending.cancelled.set()
        if self.give_up(pending):
            return
        if job is not None:  # the thread that writes has it
            job.snapshot.abandon()
            return
        snapshot = pending.snapshot
        if snapshot is not None:
            snapshot.abandon()  # the thread that looks after copies may wait for it, and would keep its memory so long
        self._end(pending)
        if not pending.done():
            pending.fail(SaveCancelled(f"{pending.describe()} was never begun: {error!r}"), "cancelled")

    def give_up(self, pending: PendingSave) -> bool:
        """Ends a save that nobody has begun to write."""
        job = self._jobs.pop(pending, None)
        if job is None:
            return False
        if self._writer.together:
            with self._changed:
                self._owed += 1  # told when the thread that writes comes to it
        error = SaveCancelled(f"{pending.describe()} was cancelled before it was written; nothing of it is kept")
        self._finish(job, None, error)
        return True

    # The thread that writes

    def _write_all(self) -> None:
        while (pending := self._queue.get()) is not None:
            job = self._jobs.pop(pending, None) if isinstance(pending, PendingSave) else None
            if job is not None:
                self._carry_out(job)
            elif self._writer.together:
                self._refuse(pending if isinstance(pending, BaseException) else pending.error)
            del job, pending  # its memory, before the next one comes

    def _refuse(self, error: BaseException | None) -> None:
        try:
            self._writer.refuse(error or SaveCancelled("a rank has cancelled its part of this save"))
        except BaseException:  # noqa: BLE001 - it was raised where it happened; what else there is, the next save meets
            _log.debug("a save of which this rank took no part", exc_info=True)
        finally:
            with self._changed:
                self._owed -= 1
                self._changed.notify_all()

    def _carry_out(self, job: _Job) -> None:
        failure, report = None, None
        try:
            report = self._attempts(job)
        except BaseException as error:  # noqa: BLE001 - it is raised at the handle, at the next call, or at the exit
            failure = error
            traceback.clear_frames(failure.__traceback__)  # they hold the state's description
            failure.add_note(f"This is what went wrong in {job.pending.describe()}, in the background.")
        self._finish(job, report, failure)
        if failure is None or isinstance(failure, (SaveCancelled, SaveSkipped)):
            return
        try:  # last: the thread that waits for us may hold a lock of a handler of the log
            _log.error("%s has failed: %s", job.pending.describe(), failure)
        except Exception:  # noqa: BLE001 - such a handler has failed; saves go on
            traceback.print_exc()

    def _finish(self, job: _Job, report: SaveReport | None, failure: BaseException | None) -> None:
        pending, loud = job.pending, None
        job.snapshot.abandon()
        self._arenas.give(job.arena)
        self._clones.give(job.cloned)
        cancelled = isinstance(failure, SaveCancelled)
        skipped = isinstance(failure, SaveSkipped)  # by another rank
        if skipped:
            self.skipped += 1
            pending.skipped = True
        if failure is not None and not cancelled and not skipped and job.settings.on_failure != "warn":
            loud = pending.error = failure
            with self._changed:
                self._untold.append(pending)
        self._end(pending, loud)
        if report is not None:
            pending.succeed(report)
        elif failure is not None:
            pending.fail(failure, "cancelled" if cancelled else "skipped" if skipped else "failed")

    def _end(self, pending: PendingSave, error: BaseException | None = None) -> None:
        if pending.flight is not None:
            pending.flight.ends(error)
        with self._changed:
            self._in_flight = [other for other in self._in_flight if other is not pending]
            self._changed.notify_all()

    def _attempts(self, job: _Job) -> SaveReport:
        pauses = iter(_RETRY_SECONDS if job.settings.on_failure == "retry" and job.snapshot.staging.keeps_all else ())
        pending = job.pending
        effort = Effort(
            staging=job.snapshot.staging,
            background=True,
            progress=pending.written,
            cancel=pending.cancelled,
            began=pending.began,
            check=lambda: job.snapshot.check(),
        )
        while True:
            pending.phase("writing")
            try:
                return self._writer.write(job.draft, effort, job.settings)
            except (StoreIOError, StorePoisoned) as error:
                pause = next(pauses, None)
                # A full disk may have been found so late that what is on it is in doubt.
                if not isinstance(error, StoreIOError) or error.errno not in OUT_OF_SPACE or self._writer.poisoned:
                    try:
                        self._writer.reopen()
                    except TierloadError as again:  # the next call on the store tries it again
                        error.add_note(f"The store could not be opened anew either: {again}")
                if pause is None:
                    raise
                _log.warning("%s is tried again in %s s: %s", pending.describe(), pause, error)
                pending.phase("waiting to try again")
                end = time.monotonic() + pause
                while time.monotonic() < end and not pending.cancelled.is_set:
                    time.sleep(_LOOK_SECONDS)
                if pending.cancelled.is_set:
                    raise SaveCancelled(f"{pending.describe()} was cancelled after it had failed: {error}") from error

    # The thread that looks after copies

    def _watch(self) -> None:
        live = Live(self._writer.path)
        while not self._ends:
            with self._changed:
                self._changed.wait_for(lambda: self._in_flight or self._ends)
                in_flight = list(self._in_flight)
            copying = next((pending for pending in in_flight if pending.copies), None)
            if copying is None or not copying.watch(_LOOK_SECONDS):
                live.show(in_flight, self.skipped)
            idle = copying is None
            del in_flight, copying  # handles that somebody drops are not kept here
            if idle:
                with self._changed:
                    self._changed.wait(_LOOK_SECONDS)
            if not self._in_flight:
                live.show([], self.skipped)
        live.close()


_OTHERS_WAIT = {function.__code__ for function in (Background.begin, Background.prepare, leaving.Flight.told)}


def copy_threads() -> int:
    """How many threads copy at a time."""
    return min(len(os.sched_getaffinity(0)), _COPY_THREADS_MAX)
