"""The pages of a commit for whoever reads them later: no collection frees them meanwhile."""

from __future__ import annotations

from tierload.engine.loading import Source, fill
from tierload.state import LoadPlan

__all__ = ["PinnedPages"]


class PinnedPages:
    """Every shard of a commit is open, which pins it, and needs its store no more: that may be closed, rolled back or
    collected. What is pinned is let go of when nobody knows this any more. A forked process reads by its parent's pin.
    """

    def __init__(self, source: Source, threads: int, rank: int) -> None:
        for holder in range(source.commit.ranks):
            source.table(holder)
        self.chunks = source.chunks
        self._source = source
        self._threads = threads
        self._rank = rank

    def read(self, plan: LoadPlan) -> None:
        """Fills every destination of a plan; see ``fill``."""
        fill(self._source, plan, self._threads, self._rank)
