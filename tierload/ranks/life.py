"""Signs of life: what a rank tells of itself, and what others make of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from tierload.ranks.board import Board, StoreUnreachable

__all__ = ["Heart", "Life", "Position"]

# The channel's number among those of its name, the save's in the channel and the round's in the save.
Position = tuple[int, int, int]


@dataclass(frozen=True)
class Life:
    """What a rank last told of itself.

    ``place`` is where its process number means something: a boot of a machine and a namespace of processes. ``at`` is
    the round that it is in or comes to next, ``arrived`` whether it has handed in its part of that one. ``beats`` only
    ever grows, so that no two are alike.
    """

    host: str
    pid: int
    started: int
    place: str
    at: Position
    arrived: bool = False
    what: str = ""
    moved: int = 0
    beats: int = 0

    @classmethod
    def of_this_process(cls) -> Life:
        """A life that has not come to any round."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _started(pid) or 0, _place(), (0, 0, 0))

    @classmethod
    def from_json(cls, text: bytes) -> Life:
        """What ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"at": tuple(fields["at"])})

    def to_json(self) -> bytes:
        """As others read it."""
        return json.dumps(asdict(self)).encode()

    def has_ended(self) -> bool:
        """Whether its process is known to be gone; of another machine's processes nothing is known."""
        return self.place == _place() and _started(self.pid) != self.started

    def who(self, rank: int) -> str:
        """How messages name it."""
        return f"rank {rank} ({self.host}, process {self.pid})"

    def doing(self) -> str:
        """The last that is known of what it did."""
        if not self.what:
            return "nothing that has to do with saving"
        return f"{self.what!r}" + (f", {self.moved:,} bytes moved" if self.moved else "")


class Heart:
    """Tells the others what this rank is doing. Threads may share it."""

    def __init__(self, board: Board, rank: int, every: float) -> None:
        self._board = board
        self._key = f"life/{rank}"
        self._every = every
        self._next = 0.0
        self._life = Life.of_this_process()
        self._lock = threading.Lock()

    @property
    def life(self) -> Life:
        """What was told last."""
        return self._life

    def at(self, position: Position, what: str, *, arrived: bool = False) -> None:
        """This rank comes to a round, or has handed in its part of it."""
        with self._lock:
            self._tell(replace(self._life, at=position, what=what, moved=0, arrived=arrived))

    def beat(self, *, what: str | None = None, moved: int | None = None) -> None:
        """It still lives and works. Cheap: told now and then only, unless what it does is another thing."""
        now = time.monotonic()
        with self._lock:
            life = replace(self._life, what=what or self._life.what, moved=self._life.moved if moved is None else moved)
            if now >= self._next or life.what != self._life.what:
                self._next = now + self._every
                self._tell(life)

    @contextmanager
    def beating(self, what: str, progress: Callable[[], int]) -> Iterator[None]:
        """For as long as the block runs, a thread tells how far ``progress`` (bytes) is whenever that has changed."""
        ended = threading.Event()
        before = progress()

        def watch() -> None:
            told = before
            while not ended.wait(self._every):
                moved = progress()
                if moved != told:
                    told = moved
                    try:
                        self.beat(moved=moved)
                    except StoreUnreachable:
                        return  # the next round says it

        self.beat(what=what, moved=before)
        thread = threading.Thread(target=watch, name="tierload-ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _tell(self, life: Life) -> None:
        self._life = replace(life, beats=life.beats + 1)
        self._board.write(self._key, self._life.to_json())


@cache
def _place() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """When a process of this machine started, in ticks since it booted; None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return None if state in "ZXx" else int(fields[18])
