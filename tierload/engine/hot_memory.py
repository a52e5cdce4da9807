"""The memory of hot tensors, locked for as long as a hot start is known."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from tierload.observe import size
from tierload.tiers import MemoryLock, lock_memory, unlock_memory

__all__ = ["HotMemory"]


class HotMemory:
    """Regions, by addresses and bytes, that ``lock`` locks next to a NUMA node; any thread may call it, once."""

    def __init__(self, regions: Sequence[tuple[int, int]], node: int | None) -> None:
        self._addresses = [address for address, _ in regions]
        self._lengths = [length for _, length in regions]
        self._node = node
        self._done = threading.Event()
        self._seconds = 0.0
        self._lock: MemoryLock | None = None
        self._turn = threading.RLock()  # a collection of garbage may unlock in the thread that locks
        self._unwanted = False
        self._owner = os.getpid()

    def lock(self) -> None:
        """Locks them, as far as the process may. Of memory that is there it costs some time for every page."""
        start = time.perf_counter()
        try:
            self._lock = lock_memory(self._addresses, self._lengths, self._node)
        finally:
            self._seconds = time.perf_counter() - start
            with self._turn:
                self._done.set()
                if self._unwanted:
                    self.unlock()

    def unlock(self) -> None:
        """Lets them be, at once or when they have been locked. A forked process has no locks on them."""
        if os.getpid() != self._owner:
            return
        with self._turn:
            self._unwanted = not self._done.is_set()
            if not self._unwanted:
                unlock_memory(self._addresses, self._lengths)

    def told(self) -> tuple[float, str]:
        """How long it took, and what came of it, when that is known."""
        if os.getpid() == self._owner:
            self._done.wait()
        lock = self._lock
        if lock is None:
            return self._seconds, "not locked: it has failed, or another process does it"
        told = f"{size(lock.locked_bytes)} locked" + ("" if self._node is None else f" on node {self._node}")
        if lock.refused_bytes:
            told += f", {size(lock.refused_bytes)} not: {lock.reason}"
        return self._seconds, f"{told}, {lock.placing}" if lock.placing else told
