"""How a process leaves while saves are in flight in the background, or after one failed and nobody was told.

A normal end waits for them (here); SIGTERM does so for a while (``native/include/tierload/ending.h``). What a save does
about it: ``flight = begins(...)`` when it is on its way, ``flight.ends(error)`` when it is not any more, and
``flight.told()`` when the program has been given the error.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tierload import _native
from tierload.observe import Progress, say, size

__all__ = ["Flight", "begins"]

_QUIET_S = 1.0  # an exit says what it waits for when that takes longer
_LOOK_S = 0.1
_LAST_S = 30.0  # for the other exit hooks, when a save was given up


@dataclass(frozen=True, slots=True)
class _Save:
    what: str
    progress: Callable[[], tuple[int, int]]


class _Leaving:
    """What this process has to see to before it ends. A forked child begins with a new one."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards what follows
        self.in_flight: dict[int, _Save] = {}
        self.untold: dict[int, str] = {}  # as text: a traceback would keep alive what its frames hold
        self.said: set[int] = set()  # those that the exit has told
        self.grace_seconds = 0.0
        self.hooked = False


_leaving = _Leaving()
_numbers = itertools.count(1)


class Flight:
    """A save in flight, as this module knows it. Its methods may be called by any thread, and more than once."""

    def __init__(self, number: int) -> None:
        self._number = number

    def ends(self, error: BaseException | None = None) -> None:
        """The save is durable, or failed with ``error``: then the process's exit fails until somebody is ``told``."""
        leaving = _leaving
        failure = ""
        with leaving.changed:
            save = leaving.in_flight.get(self._number)
            if save is None:
                return  # ended already, or in the process that this one was forked from
            if error is not None:
                failure = _failure(save.what, error)
                leaving.untold[self._number] = failure
                _native.fail_exit()
            del leaving.in_flight[self._number]
            leaving.changed.notify_all()
        if failure and _native.terminating():
            say(failure)  # there will be no exit to say it
        _native.save_ends(self._number)

    def told(self) -> None:
        """The program knows of the error: it is its own affair now."""
        leaving = _leaving
        with leaving.changed:
            if leaving.untold.pop(self._number, None) is not None and not leaving.untold:
                _native.forgive_exit()

    @property
    def said(self) -> bool:
        """Whether the exit of the process has told its error."""
        return self._number in _leaving.said


def begins(what: str, progress: Callable[[], tuple[int, int]], *, grace_seconds: float) -> Flight:
    """Says that a save is in flight: the process does not end before it has, if it can be helped.

    ``what`` is for people: "the save of step 200 into runs/gpt". ``progress`` gives the bytes that are done and those
    in all; any thread may call it at any time until the save has ended. ``grace_seconds`` is that of ``Settings``.

    The threads that the save needs must be daemons and run already: Python waits for other ones without a word before
    it gets here, and refuses new ones when it ends.
    """
    leaving = _leaving
    number = next(_numbers)
    flight = Flight(number)
    try:
        with leaving.changed:
            if not leaving.hooked:
                # Now, and not when this module is imported: hooks run last in, first out, and stores are closed by one.
                atexit.register(_leave)
                if multiprocessing.parent_process() is not None:  # forked workers run these alone
                    multiprocessing.util.Finalize(None, _leave, exitpriority=0)
                leaving.hooked = True
            leaving.in_flight[number] = _Save(what, progress)
            leaving.grace_seconds = grace_seconds
        _native.save_begins(number, what)
        _native.watch_termination(grace_seconds)
        return flight
    except BaseException:  # an interrupt: the exit would wait for a save that nobody makes
        flight.ends()
        raise


def _leave() -> None:
    leaving = _leaving
    try:
        _wait(leaving)
    except KeyboardInterrupt:
        for save in _waited_for(leaving):
            say(f"tierload: interrupted: {save.what} is not finished; the store is whole without it")
        _tell(leaving)
        _end_by_interrupt()
    _tell(leaving)


def _wait(leaving: _Leaving) -> None:
    """Until nothing is in flight, or what is has not moved for the grace time: it then counts as failed."""
    started_s = moved_s = time.monotonic()
    seen: list[tuple[int, int]] = []
    with ExitStack() as stack:
        shown: Progress | None = None
        while saves := _waited_for(leaving):
            now_s = time.monotonic()
            progress = [save.progress() for save in saves]
            done, total = (sum(column) for column in zip(*progress, strict=True))
            what = ", ".join(save.what for save in saves)
            if progress != seen:
                seen, moved_s = progress, now_s
            elif now_s - moved_s >= leaving.grace_seconds:
                _give_up(leaving)
                return
            if shown is None and now_s - started_s >= _QUIET_S:
                far = f"{size(done)} of about {size(total)}"
                say(f"tierload: waiting for {what} before the process ends: {far} (Ctrl-C ends it without)")
                shown = stack.enter_context(Progress("tierload: waiting"))
            if shown is not None:
                shown.update(done, total, what)
            with leaving.changed:
                leaving.changed.wait_for(lambda: len(leaving.in_flight) < len(saves), timeout=_LOOK_S)


def _waited_for(leaving: _Leaving) -> list[_Save]:
    with leaving.changed:
        return list(leaving.in_flight.values())


def _give_up(leaving: _Leaving) -> None:
    with leaving.changed:
        for number, save in leaving.in_flight.items():
            leaving.untold[number] = (
                f"tierload: {save.what} is not finished, and nothing has moved for {leaving.grace_seconds:g} s; "
                "the process ends without it, and the store is whole without it"
            )
        _native.fail_exit()
    # What is closed next may wait for what the save holds: that ends too, and says where everything stood.
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback_later(_LAST_S, exit=True, file=2)


def _tell(leaving: _Leaving) -> None:
    with leaving.changed:
        texts = list(leaving.untold.values())
        leaving.said.update(leaving.untold)
        leaving.untold.clear()
    for text in texts:
        say(text)


def _failure(what: str, error: BaseException) -> str:
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"tierload: {what} failed in the background: {summary}\n{trace}"


def _end_by_interrupt() -> None:
    """As Python ends when nobody catches a Ctrl-C, so that a shell stops its script too; but at once."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # where the signal is blocked


def _forget() -> None:
    global _leaving
    _leaving = _Leaving()


os.register_at_fork(after_in_child=_forget)
