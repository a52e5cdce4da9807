"""Memory for copies of states: how much there is, and what is kept from one save to the next."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from tierload import _native

__all__ = ["Arenas", "available_bytes"]

_log = logging.getLogger("tierload")

_POLL_SECONDS = 0.1
_LEAST_BYTES = 64 << 20

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Bytes of memory that this process can still take without others being pushed out, or itself being killed."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = next(int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:")
    for limit, usage in _CGROUPS:
        try:
            ours, used = Path(limit).read_text().strip(), int(Path(usage).read_text())
        except OSError:
            continue  # another version of cgroups
        if ours != "max":
            found = min(found, max(int(ours) - used, 0))
    return found


class Arenas:
    """Arenas within a budget; each is kept for a later save. Any thread may use it."""

    def __init__(self) -> None:
        self._idle: list[_native.Arena] = []
        self._out: weakref.WeakSet[_native.Arena] = weakref.WeakSet()  # one that a failure dropped counts no more
        self._changed = threading.Condition()

    def take(self, nbytes: int, budget: int) -> _native.Arena:
        """An arena of ``nbytes``; a smaller one when the budget is (0: half of the memory that is available). Waits
        while others have what it needs.

        Raises:
            MemoryError: The system has no such range of addresses.
        """
        with self._changed:
            # What is held already needs no look at how much there is, which takes several files of the kernel's.
            limit = budget or (nbytes if self._has(nbytes) else self._default())
            wanted = min(nbytes, limit)
            start = time.perf_counter()
            while self._out and _sum(self._out) + wanted > limit:
                self._changed.wait(_POLL_SECONDS)
            if time.perf_counter() - start > _POLL_SECONDS:
                _log.warning(
                    "a save waited %.3f s for memory that earlier ones still needed: host_budget_bytes allows %s bytes",
                    *(time.perf_counter() - start, limit),
                )
            fitting = [arena for arena in self._idle if arena.nbytes >= wanted]
            arena = min(fitting, key=lambda found: found.nbytes, default=None)
            self._idle = [found for found in fitting if found is not arena]  # the others are outgrown
            if arena is None:
                arena = _native.Arena(wanted)
            self._out.add(arena)
            return arena

    def give(self, arena: _native.Arena) -> None:
        """Takes an arena back that nobody uses any more."""
        with self._changed:
            self._out.discard(arena)
            self._idle.append(arena)
            self._changed.notify_all()

    def drop(self) -> None:
        """Gives what nobody uses back to the system."""
        with self._changed:
            self._idle = []

    def _has(self, nbytes: int) -> bool:
        return not self._out and any(arena.nbytes >= nbytes for arena in self._idle)

    def _default(self) -> int:
        return max((available_bytes() + _sum(self._out) + _sum(self._idle)) // 2, _LEAST_BYTES)


def _sum(arenas: Iterable[_native.Arena]) -> int:
    return sum(arena.nbytes for arena in arenas)
