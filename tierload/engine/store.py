"""An open store: the object behind every function of the interface."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tierload.catalog import choose_dropped
from tierload.engine import comparing, rolling, values
from tierload.engine.opened import Which
from tierload.engine.pending import PendingSave
from tierload.engine.saving import Effort
from tierload.engine.writing import WritingStore
from tierload.errors import CommitNotFound, CorruptStore, InvalidRequest, TierloadError
from tierload.types import CollectReport, Commit, RollbackPlan, SaveReport

if TYPE_CHECKING:
    from tierload.heat import HeatMeter

__all__ = ["Store"]


class Store(WritingStore):
    """A store, open for reading (``mode="r"``) or for writing (``"w"``, which creates it and holds it until ``close``).

    A reader sees the commits that were durable when it was opened, and never blocks a writer. All methods may be called
    from any thread; they run one at a time. ``warnings`` are faults that cost nothing, such as a damaged mirror.

    Raises:
        StoreNotFound: ``mode="r"`` and there is no store at ``path``.
        StoreBusy: ``mode="w"`` and another process holds it; the message names it. ``take_over=True`` fences that one
            off: for a holder that is frozen, on this machine or another.
        CorruptStore: Metadata is damaged beyond its mirrors; a reader still opens at the newest whole state.
        UnsupportedFormat: A newer release wrote it.
    """

    def save(
        self,
        state: object,
        *,
        step: int | None = None,
        metrics: Mapping[str, object] | None = None,
        tags: Sequence[str] = (),
        note: str = "",
        allow_pickle: bool = False,
        heat: HeatMeter | None = None,
    ) -> SaveReport:
        """Saves a state and returns when it would survive a power cut. Pages equal to the head's are not written again.
        Saves in the background that were begun before are waited for. ``heat``: what this meter has measured of the
        state's parameters becomes a part of the commit (``heat()``).

        Raises:
            UnsupportedValue: Something in the state cannot be stored; it names the path. Nothing was written.
            InvalidRequest: ``heat`` is no meter.
            StoreIOError: The disk is full or failed; earlier commits are whole.
        """
        effort = Effort(began=time.perf_counter())
        if self.together:
            self.refuse_inside()  # before anything that the other ranks are told
        try:
            self._wait_for_background()
            draft = self._draft(state, values.step_of(step), metrics, tags, note, allow_pickle, heat)
        except BaseException as error:
            if self.together:
                if self._background is not None:
                    self._background.settle()
                self.refuse(error)
            raise
        report = self.write(draft, effort, self.settings)
        return dataclasses.replace(report, waited_seconds=report.seconds)

    def async_save(
        self,
        state: object,
        *,
        step: int | None = None,
        metrics: Mapping[str, object] | None = None,
        tags: Sequence[str] = (),
        note: str = "",
        allow_pickle: bool = False,
        heat: HeatMeter | None = None,
    ) -> PendingSave:
        """Saves the state as it is now, beside the caller: returns when the values are safe, but for those of guarded
        optimizers (``tierload.guard``), whose step waits for what is left.

        Raises:
            UnsupportedValue: Something in the state cannot be stored; it names the path. Nothing was written.
            StoreIOError, ...: An earlier save in the background has failed, and nobody has asked for its result.
        """
        self.refuse_inside()
        background = self._in_background()
        try:
            background.raise_untold()
            number = values.step_of(step)
        except BaseException as error:
            if self.together:
                background.owe(error)
            raise
        return background.begin(
            lambda: self._draft(state, number, metrics, tags, note, allow_pickle, heat), number, self.settings
        )

    def prepare(self, state: object) -> None:
        """Gets ready for asynchronous saves of a state like this (or, given an int, of so many bytes): what is needed
        only once is done now, or begun beside the caller. Without it the first save is slower than the others."""
        if isinstance(state, int):
            nbytes, pages = state, None
        else:
            draft = self._draft(state, None, None, (), "", allow_pickle=False, heat=None)  # has what is copied
            pages = draft.page_set
            nbytes = pages.staging_bytes
        self._device(nbytes)
        self._in_background().prepare(nbytes, self.settings, pages)

    def wait(self) -> None:
        """Returns when no save is in flight. Raises what went wrong in one that nobody has asked about."""
        self._wait_for_background()

    @property
    def skipped(self) -> int:
        """How many saves ``on_busy="skip"`` has left out."""
        return self._background.skipped if self._background else 0

    def rollback(
        self,
        to: Which | None = None,
        *,
        lsn: int | None = None,
        steps: int | None = None,
        dry_run: bool = False,
    ) -> RollbackPlan:
        """Makes an earlier state the head again: ``to`` a step, tag or commit id, to an ``lsn``, or ``steps`` commits
        back. It is itself a commit, so it can be undone; no data is copied or lost. Recorded values go back with it.

        Raises:
            CommitNotFound: There is no such commit.
            CorruptStore: The target's metadata is damaged; nothing was changed.
        """
        if sum(value is not None for value in (to, lsn, steps)) != 1:
            raise InvalidRequest("say where to roll back to: one of to=, lsn= and steps=")
        self._refuse_elsewhere("roll back")
        self._wait_for_background()
        with self._turn, self._lock:
            view = self._view()
            if lsn is None:
                target = view.back(steps) if steps is not None else self._find(to)  # type: ignore[arg-type]
                past = self._native.state_at(target.lsn)
            else:
                if not 0 < lsn <= self._native.last_lsn:
                    raise CommitNotFound(f"there is no LSN {lsn}; the newest is {self._native.last_lsn}")
                past = self._native.state_at(lsn)
                if past.head not in view:
                    raise CommitNotFound(f"at LSN {lsn} there was no commit, or it has been collected since")
                target = view[past.head]
            problem = self._native.check_commit(target.txid)
            if problem:
                raise CorruptStore(f"{self.path}: commit {target.id[:12]} (step {target.step}) is damaged: {problem}")
            plan = rolling.plan_rollback(self._native, view, target, past)
            if dry_run:
                with contextlib.suppress(CorruptStore):  # the head may be what one goes back from because it is damaged
                    difference = comparing.compare(self._native, plan.head, target, self._threads)
                    plan = dataclasses.replace(plan, difference=difference)
                return plan
            txid = rolling.commit_rollback(self._native, plan, past)
            return dataclasses.replace(plan, commit=self._view()[txid])

    def tag(self, name: str, commit: Which | None = None, *, remove: bool = False) -> None:
        """Names a commit (the head), moves the name, or removes it. A tagged commit is never collected."""
        self._refuse_elsewhere("tag")
        if commit is None or (isinstance(commit, int) and self._background and self._background.in_flight(commit)):
            self._wait_for_background()
        else:
            self._raise_untold()
        with self._lock:
            if remove:
                self._view().find(tag=name)  # an error when there is none
                txid = 0
            else:
                txid = (self._view().find() if commit is None else self._find(commit)).txid
            self._native.tag(name.encode("utf-8", "surrogatepass"), txid)

    def record(self, key: str, value: object, step: int | None = None, *, sync: bool = True) -> int:
        """Logs a small value between commits and returns its LSN; durable when it returns. With ``sync=False`` it
        becomes durable with the next commit or synced record. A rollback brings back the value of its time."""
        self._refuse_elsewhere("record values")
        document = values.encode_recorded(key, value, step)
        self._raise_untold()
        with self._lock:
            self._reopen_if_needed()
            cached = self._cached
            known = cached is not None and cached[0] == self._native.last_lsn
            lsn = self._native.change(key.encode("utf-8", "surrogatepass"), document, sync)
            if known and cached is not None and self._cached is cached:  # commits and tags are what they were
                self._cached = (lsn, cached[1])
            return lsn

    def collect(
        self,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        dry_run: bool = False,
    ) -> CollectReport:
        """Drops old commits and frees what nothing references. ``keep``: the newest so many of the head's line;
        ``keep_every``: also those whose step is a multiple; ``keep_best``: also the one with the best value of a metric
        (``"loss:min"`` or ``"accuracy:max"``). The head, tagged commits, and what a reader is using stay, and so does
        the newest commit whose metrics are all finite. Without ``keep`` nothing is dropped; only remains of interrupted
        saves are removed. A save in flight is not waited for, and does not wait.

        Raises:
            InvalidRequest: ``keep`` is less than 1, or ``keep_best`` does not say which values are better.
            CorruptStore: A kept commit's metadata is damaged: nothing is freed while that is so.
        """
        self._refuse_elsewhere("collect")
        self._raise_untold()
        with self._lock:
            view = self._view()
            dropped: tuple[Commit, ...] = ()
            if keep is not None:
                dropped = choose_dropped(
                    view.commits, view.line, view.sources, keep=keep, keep_every=keep_every, keep_best=keep_best
                )
            elif keep_every is not None or keep_best is not None:
                raise InvalidRequest(
                    "keep_every and keep_best need keep: how many of the newest commits to keep besides"
                )
            if dry_run:
                return CollectReport(dropped=dropped)
            result = self._native.collect([c.txid for c in dropped])
        return CollectReport(dropped, result.removed_files, result.freed_bytes, result.pinned)

    def close(self) -> None:
        """Lets go of the store, when the saves in the background are durable; raises what went wrong in them. Closing
        twice is fine. Records that were not synced are made durable."""
        while not self._closed:
            background = self._background
            if background is not None:
                self.refuse_inside()
                background.close()
            with self._lock:
                if self._background is background:  # and not made just now, by another thread
                    super().close()
                    if self._job is not None:
                        self._job.channel.close()
        self._raise_untold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except TierloadError as failure:
            error.add_note(f"Besides, {failure}")  # the caller's own error is the one that is raised
