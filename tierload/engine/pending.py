"""A save in the background, as its caller sees it."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tierload import _native
from tierload.engine import guards
from tierload.errors import InvalidRequest, SaveCancelled, SaveSkipped, SaveTimeout
from tierload.observe import Progress
from tierload.types import Commit, SaveProgress, SaveReport

if TYPE_CHECKING:
    from tierload.engine.leaving import Flight
    from tierload.engine.staging import Snapshot

__all__ = ["PendingSave"]

_T = TypeVar("_T")
_LOOK_S = 0.1  # between two looks at a save whose progress is shown


class PendingSave:
    """A save that ``async_save`` began. Every method may be called from any thread, and as often as one likes.

    ``await pending`` gives the ``SaveReport`` without blocking the event loop. ``step`` and ``path`` are those of the
    call; ``skipped`` is true when ``on_busy="skip"`` left it out; ``waited`` are the seconds for which this save has
    held up the training loop so far: the call itself, and the optimizer's steps that waited for the copy.
    """

    def __init__(
        self,
        path: str,
        step: int | None,
        told: Callable[[PendingSave], None],
        give_up: Callable[[PendingSave], bool],
        refuse_inside: Callable[[], None],
    ) -> None:
        self.path = path
        self.step = step
        self.skipped = False
        self.waited = 0.0
        self.began = time.perf_counter()
        self.error: BaseException | None = None
        self.written = _native.Progress()
        self.cancelled = _native.Cancel()
        self.snapshot: Snapshot | None = None
        self.flight: Flight | None = None
        self.total_bytes = 0
        self._copied_bytes = 0  # in the end
        self._phase = "staging"
        self._staged: Future[None] = Future()
        self._durable: Future[SaveReport] = Future()
        for future in (self._staged, self._durable):
            future.set_running_or_notify_cancel()  # a task that gives up awaiting must not cancel it
        self._told = told
        self._give_up = give_up
        self._refuse_inside = refuse_inside
        self._owner = os.getpid()
        self._lock = threading.RLock()

    def describe(self) -> str:
        """What this is, for messages."""
        step = "a state" if self.step is None else f"step {self.step}"
        return f"the save of {step} into {self.path}"

    # For its caller

    def staged(self, timeout: float | None = None) -> None:
        """Returns when the values of the call are safe from every later change: guarded parameters may change now.

        Raises:
            SaveTimeout: Not within ``timeout`` seconds.
            TornSave, StoreIOError, ...: The save has failed.
        """
        self._check_caller()
        snapshot = self.snapshot
        if snapshot is not None and timeout is None:
            self.settle()
            snapshot.wait(None)
        elif snapshot is not None:
            snapshot.wait(timeout)
        self._result(self._staged, timeout, "staged")

    def durable(self, timeout: float | None = None, *, progress: bool = False) -> Commit:
        """Returns the commit when it would survive a power cut; raises what went wrong. See ``result``.

        Raises:
            SaveTimeout: Not within ``timeout`` seconds; the save goes on.
        """
        return self.result(timeout, progress=progress).commit

    def result(self, timeout: float | None = None, *, progress: bool = False) -> SaveReport:
        """What the save did, once it is durable; raises what went wrong. ``progress`` shows on stderr how far it is: as
        a bar on a terminal, as a line now and then elsewhere.

        Raises:
            SaveTimeout: Not within ``timeout`` seconds; the save goes on.
            SaveCancelled, SaveSkipped: Nothing was saved.
        """
        self._check_caller()
        if progress:
            self._show_until(time.monotonic() + (math.inf if timeout is None else timeout))
        return self._reported(self._result(self._durable, timeout, "durable", waited=progress))

    def cancel(self) -> bool:
        """Gives the save up. False when it is too late: it is committed, or has failed already."""
        self._check_caller()
        self.cancelled.set()
        if self._give_up(self):
            return True
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.abandon()
        # Any other failure is kept, and raised at the handle, the next call, or the exit.
        return isinstance(self._durable.exception(), SaveCancelled)

    def done(self) -> bool:
        """Whether it is durable, or never will be."""
        return self._durable.done()

    @property
    def progress(self) -> SaveProgress:
        """How far it is."""
        snapshot = self.snapshot
        staged = self._copied_bytes if snapshot is None else snapshot.staging.copied_bytes
        return SaveProgress(self._phase, staged, self.written.bytes, self.total_bytes)

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """For changes of weights between the steps: inside, everything may be changed. Waits for what is still being
        copied, by other saves too."""
        self._check_caller()
        guards.settle_all()
        yield

    def __await__(self) -> Generator[Any, None, SaveReport]:
        self._check_process()
        try:
            return self._reported((yield from asyncio.wrap_future(self._durable).__await__()))
        except BaseException as error:
            if self._durable.done() and self._durable.exception() is error:  # and not that the task was cancelled
                self._told(self)
            raise

    def __repr__(self) -> str:
        return f"PendingSave({self.describe()}: {self._phase})"

    def _result(self, future: Future[_T], timeout: float | None, word: str, *, waited: bool = False) -> _T:
        try:
            error = future.exception(0 if waited and timeout is not None else timeout)
        except TimeoutError:
            if not future.done():
                text = f"{self.describe()} is not {word} after {timeout} s ({self._phase}); it goes on"
                raise SaveTimeout(text) from None
            error = future.exception()
        if error is None:
            return future.result()
        try:
            raise error
        finally:
            self._told(self)

    def _show_until(self, end_s: float) -> None:
        with Progress(f"tierload: {self.describe()}") as shown:
            while not self._durable.done() and time.monotonic() < end_s:
                now = self.progress
                shown.update(now.written_bytes, now.total_bytes, now.phase)
                wait([self._durable], min(_LOOK_S, max(end_s - time.monotonic(), 0.0)))

    def _reported(self, report: SaveReport) -> SaveReport:
        # A small save may be durable before its call has returned, so how long that took is known only now.
        return replace(report, waited_seconds=self.waited)

    def _check_caller(self) -> None:
        self._check_process()
        if not self._durable.done():
            self._refuse_inside()

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise InvalidRequest(f"{self.describe()} belongs to process {self._owner}; this one was forked from it")

    # For the engine

    def take(self, snapshot: Snapshot) -> None:
        """The copy that will be written."""
        self.total_bytes = snapshot.staging.raw_bytes
        self.snapshot = snapshot

    @property
    def copies(self) -> bool:
        """Whether somebody copies from the state."""
        return self.snapshot is not None and not self._staged.done()

    @property
    def finishes_here(self) -> bool:
        """Whether this thread is about to say that nobody does any more."""
        snapshot = self.snapshot
        return snapshot is not None and snapshot.finishes_here

    def watch(self, timeout: float) -> bool:
        """Waits until that is so."""
        snapshot = self.snapshot
        return snapshot is not None and snapshot.wait(timeout)

    def moved(self) -> tuple[int, int]:
        """Bytes that were written, and those that there are."""
        return self.written.bytes, self.total_bytes

    def settle(self) -> None:
        """Waits until the state may change, with the caller's help."""
        snapshot = self.snapshot
        if snapshot is not None:
            start = time.perf_counter()
            snapshot.settle()
            self.waited += time.perf_counter() - start

    def phase(self, name: str) -> None:
        """What it is at now."""
        self._phase = name

    def mark_staged(self) -> None:
        """Everything was copied, or never will be."""
        if self._phase == "staging":
            self._phase = "queued"
        guards.settled(self)
        with self._lock:
            if not self._staged.done():
                snapshot = self.snapshot
                torn = snapshot.error if snapshot is not None else None
                if torn is None:
                    self._staged.set_result(None)
                else:
                    self._staged.set_exception(torn)

    def skip(self, error: SaveSkipped) -> None:
        """It is not even begun."""
        self.skipped = True
        self.fail(error, "skipped")

    def succeed(self, report: SaveReport) -> None:
        """It is durable."""
        self._phase = "durable"
        self._let_go()
        self._durable.set_result(report)

    def fail(self, error: BaseException, phase: str = "failed") -> None:
        """It never will be."""
        self._phase = phase
        self.error = error
        with self._lock:
            if not self._staged.done():
                self._staged.set_exception(error)
        guards.settled(self)
        self._let_go()
        self._durable.set_exception(error)

    def _let_go(self) -> None:
        """A handle that somebody keeps does not keep the copy."""
        snapshot = self.snapshot
        if snapshot is not None:
            self._copied_bytes = snapshot.staging.copied_bytes
            self.snapshot = None
