"""Runs a function of a test in the ranks of a real job: one process each, gloo between them."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.ranks.zygote import Request

ROOT = Path(__file__).resolve().parents[2]
_STACKS_S = 0.5  # so long a rank has to write where it stands
_TAIL = 6000


@dataclass
class Outcome:
    """How a rank ended: it returned, raised, or was killed by a signal (``status`` is then minus its number)."""

    status: int | None = None
    result: Any = None
    exception: BaseException | None = None
    said: str = ""  # on stdout and stderr


class World:
    """Ranks that run. ``pids`` are their processes."""

    def __init__(self, ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...], store: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tierload-ranks-", dir="/dev/shm"))
        self._zygote = _zygote()
        request = Request(ranks, _module(function), function.__qualname__, arguments, str(self.folder), store)
        self._zygote.send(request)
        self._status: dict[int, int] = {}
        self.pids: list[int] = self._zygote.recv()

    def signal(self, rank: int, number: int) -> None:
        """Sends a rank a signal, unless it is known to have ended."""
        if rank not in self._status:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def said(self, rank: int) -> str:
        """What it has written to stdout and stderr so far."""
        path = self.folder / f"stderr.{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def outcomes(self, limit: float = 60.0, kill: Mapping[int, float] | None = None) -> list[Outcome]:
        """Waits for all. ``kill`` says which ranks are killed, and after how many seconds.

        Raises:
            AssertionError: some had not ended within the limit; all are killed, and it says where they stood.
        """
        began = time.monotonic()
        due = dict(kill or {})
        late = ""
        try:
            while len(self._status) < len(self.pids):
                now = time.monotonic() - began
                for rank in [rank for rank, after in due.items() if after <= now]:
                    self.signal(rank, signal.SIGKILL)
                    del due[rank]
                if now > limit and not late:
                    late = self._stopped(limit)
                self._listen(min([0.1, *(after - now for after in due.values())]))
            outcomes = [self._outcome(rank) for rank in range(len(self.pids))]
        finally:
            self.end()
        assert not late, late
        return outcomes

    def end(self) -> None:
        """Kills those who are left; the next world needs the zygote to be done with this one."""
        for rank in range(len(self.pids)):
            self.signal(rank, signal.SIGKILL)
        while len(self._status) < len(self.pids):
            self._listen(1.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stopped(self, limit: float) -> str:
        """Kills all that are left; who they were and what they said, with where they stood."""
        left = [rank for rank in range(len(self.pids)) if rank not in self._status]
        for rank in left:
            self.signal(rank, signal.SIGCONT)
            self.signal(rank, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        for rank in left:
            self.signal(rank, signal.SIGKILL)
        tails = "\n".join(f"--- rank {rank}\n{self.said(rank)[-_TAIL:]}" for rank in range(len(self.pids)))
        return f"ranks {left} had not ended after {limit:g} s:\n{tails}"

    def _listen(self, seconds: float) -> None:
        if self._zygote.poll(max(seconds, 0)):
            rank, status = self._zygote.recv()
            self._status[rank] = status

    def _outcome(self, rank: int) -> Outcome:
        outcome = Outcome(self._status[rank], said=self.said(rank))
        path = self.folder / f"outcome.{rank}"
        if path.exists():
            kind, value = pickle.loads(path.read_bytes())
            setattr(outcome, kind, value)
        return outcome


def world(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    store: str = "tcp",
    limit: float = 60.0,
    kill: Mapping[int, float] | None = None,
) -> list[Outcome]:
    """How ``function(rank, ranks, *arguments)`` ended on each rank; it is one of a module's, by its name there."""
    return World(ranks, function, arguments, store).outcomes(limit, kill)


def results(ranks: int, function: Callable[..., Any], *arguments: Any, store: str = "tcp", limit: float = 60.0) -> Any:
    """What all ranks returned; what one raised is raised."""
    outcomes = world(ranks, function, *arguments, store=store, limit=limit)
    for rank, outcome in enumerate(outcomes):
        if outcome.exception is not None:
            outcome.exception.add_note(f"on rank {rank}; it said:\n{outcome.said[-_TAIL:]}")
            raise outcome.exception
        assert outcome.status == 0, f"rank {rank} ended with {outcome.status}:\n{outcome.said[-_TAIL:]}"
    return [outcome.result for outcome in outcomes]


def _module(function: Callable[..., Any]) -> str:
    """The name that a fresh interpreter knows its module by; pytest's may be shorter."""
    path = Path(function.__code__.co_filename).resolve()
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def _zygote() -> Connection:
    """The pipe to it. There is one for this process, and it ends with it."""
    here, there = Pipe()
    command = [sys.executable, "-c", "from tests.ranks.zygote import main; main()", str(there.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
    there.close()
    atexit.register(process.kill)
    return here
