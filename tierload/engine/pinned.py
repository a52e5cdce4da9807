"""The pages of a commit for whoever reads them later: no collection frees them meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tierload.engine.loading import Source, fill
from tierload.errors import CommitNotFound, StoreNotFound
from tierload.state import LoadPlan

__all__ = ["PinnedPages", "pinned"]


def pinned(source: Source) -> Source:
    """The same commit with every shard open, which pins it: it needs its store no more."""
    for holder in range(source.commit.ranks):
        source.table(holder)
    return source


class PinnedPages:
    """The pages of a ``pinned`` commit. It is let go of when nobody knows this any more; meanwhile the store may be
    closed, rolled back or collected.

    Pins are of one process: another one has to ``find`` the commit by itself, a forked one when it first reads.
    """

    def __init__(self, source: Source, find: Callable[[], Source], threads: int, rank: int) -> None:
        self.chunks = source.chunks
        self._source = source
        self._find = find
        self._threads = threads
        self._rank = rank
        self._owner = os.getpid()

    @classmethod
    def found(cls, find: Callable[[], Source], threads: int, rank: int) -> Self:
        """In a process that was told where it is."""
        return cls(find(), find, threads, rank)

    def read(self, plan: LoadPlan) -> None:
        """Fills every destination of a plan; see ``fill``."""
        if self._owner != os.getpid():
            # Where it is dropped by now, there is what the parent holds, as long as the parent holds it.
            with suppress(CommitNotFound, StoreNotFound):
                self._source = self._find()
            self._owner = os.getpid()
        fill(self._source, plan, self._threads, self._rank)

    def __reduce__(self) -> tuple[object, ...]:
        return PinnedPages.found, (self._find, self._threads, self._rank)
