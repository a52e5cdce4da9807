"""Copies of states where they are, in accelerators' memory: what they may take, and what is kept for the next one."""

from __future__ import annotations

import logging
import threading
import weakref

from tierload import _native
from tierload.engine.accelerators import DeviceMemory, allocate, free_bytes, streams

__all__ = ["CloneMemory", "Clones"]

_log = logging.getLogger("tierload")

CloneMemory = list[DeviceMemory]
"""Memory for one clone, of each accelerator that it needs some of."""


class Clones:
    """Memory for clones, within a budget; each is kept for a later save. Any thread may use it."""

    def __init__(self) -> None:
        self._idle: list[DeviceMemory] = []
        self._out: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()  # what a failure dropped counts no more
        self._last: tuple[_native.PageSet, list[int], _native.Clone] | None = None
        self._lock = threading.Lock()

    def take(self, pages: _native.PageSet, budget: int) -> CloneMemory | None:
        """Memory for a clone of some pages; None when no accelerator has any of them, or one has not enough within
        ``budget`` bytes for all saves in flight (0: half of what nobody has)."""
        needed = pages.clone_bytes
        taken: CloneMemory = []
        for number, nbytes in needed:
            found = self._take(number, nbytes, budget)
            if found is None:
                self.give(taken)
                _log.warning(
                    "a save is copied to the host: a clone of %s bytes does not fit into device_budget_bytes of "
                    "accelerator %s",
                    *(nbytes, number),
                )
                return None
            taken.append(found)
        return taken or None

    def clone(self, pages: _native.PageSet, memory: CloneMemory) -> _native.Clone:
        """Begins to copy, in turn with what the caller gives its accelerators to do. The same pages are not planned
        anew."""
        handles = dict(streams(one.number for one in memory))
        rooms = [(one.number, one.pointer, one.nbytes, handles[one.number]) for one in memory]
        places = [one.pointer for one in memory]
        known = self._last
        if known is not None and known[0] is pages and known[1] == places:
            clone = _native.Clone(known[2], rooms)
        else:
            clone = _native.Clone(pages, rooms)
        self._last = pages, places, clone
        return clone

    def give(self, memory: CloneMemory) -> None:
        """Takes back what nobody uses any more. It is kept while as much again is free: training may come to need
        it."""
        for one in memory:
            try:
                keep = free_bytes(one.number) >= one.nbytes
            except RuntimeError:  # the device is lost: nothing can be given back to it either
                keep = True
            with self._lock:
                self._out.discard(one)
                # What was outgrown is not needed again.
                idle = [other for other in self._idle if other.number != one.number or other.nbytes >= one.nbytes]
                self._idle = [*idle, one] if keep else idle

    def drop(self) -> None:
        """Gives what nobody uses back to the framework."""
        with self._lock:
            self._idle = []
            self._last = None

    def _take(self, number: int, nbytes: int, budget: int) -> DeviceMemory | None:
        with self._lock:
            left = budget and budget - sum(one.nbytes for one in self._out if one.number == number)
            for one in self._idle:
                if one.number == number and one.nbytes >= nbytes and (budget == 0 or one.nbytes <= left):
                    self._idle.remove(one)
                    self._out.add(one)
                    return one
            self._idle = [one for one in self._idle if one.number != number]
            if nbytes > (left if budget else free_bytes(number) // 2):
                return None
            made = allocate(number, nbytes)
            if made is not None:
                self._out.add(made)
            return made
