"""How a loop is asked to end after a step: by SIGTERM, or by ``run.stop()``; and that all ranks end after the same one.

SIGTERM is taken over while a loop runs, in the main thread, where nobody else has. The first one is noted. A second one
ends the process at once: by then the signal has its default action back, so that it works in the longest call into C,
too. ``tierload.engine.leaving`` holds SIGTERM back for saves in flight in the same way, only where nobody handles it,
so the two never meet: the last save of a loop that was told to end is one that its caller waits for.

A signal comes to ranks at different moments, and a rank that saves by itself would wait for the others for ever. So the
first one that is asked writes down, at the end of its step, that all end after the next one; every rank looks there at
the end of each step. Ranks whose steps wait for one another (as in any training with shared gradients) read it in time:
none ends a step before all have begun it.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch.distributed as dist

from tierload.errors import RankLost, RanksDisagree
from tierload.ranks import Board, StoreUnreachable

__all__ = ["Stopping"]

_numbers = itertools.count(1)  # sessions of this process; all ranks of a job have the same


class Stopping:
    """Whether a loop is to end. ``signal`` is the number of the signal that wants it, or None."""

    def __init__(self, *, on_signal: bool) -> None:
        self.signal: int | None = None
        self._takes_signals = on_signal
        self._owner = os.getpid()
        self._taken = False
        self._asked = False
        self._loops = 0
        self._board: Board | None = None

    def join(self, limit_seconds: float) -> None:
        """From now on all ranks of the job end together."""
        store: Any = dist.distributed_c10d._get_default_store()
        self._board = Board(store, f"session/{next(_numbers)}", limit_seconds)

    def watch(self) -> None:
        """A loop begins."""
        self._loops += 1
        self._owner = os.getpid()
        self._asked = False
        main = threading.current_thread() is threading.main_thread()
        if self._takes_signals and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._taken = True

    def rest(self) -> None:
        """It has ended."""
        if self._taken:
            self._taken = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ask(self) -> None:
        """The loop is to end."""
        self._asked = True

    def after(self, step: int) -> bool:
        """Whether it ends after this step.

        Raises:
            RanksDisagree: The other ranks have ended already.
            RankLost: The key-value store of the job does not answer.
        """
        asked = self._asked or self.signal is not None
        if self._board is None:
            return asked
        try:
            key = f"last step of loop {self._loops}"
            agreed = self._board.get(key)
            if agreed is None and asked:
                self._board.write(key, f"{step + 1} {self.signal or 0}".encode())
        except StoreUnreachable as error:
            raise RankLost(f"whether the ranks end after step {step} cannot be known: {error}", ranks=(0,)) from error
        if agreed is None:
            return False
        last, number = map(int, agreed.split())
        if last < step:
            difference = f"this rank has done step {step} meanwhile: its steps do not wait for those of the others"
            raise RanksDisagree(f"the ranks were to end after step {last}", differences=[difference])
        if last > step:
            return False
        self.signal = self.signal or number or None  # all of them end the program, or none
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.rest()
        if os.getpid() == self._owner:
            self.signal = number
        else:  # a child that was forked in a step ends as it would have without us
            signal.raise_signal(number)
