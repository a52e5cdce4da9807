"""A commit that is read in parts: its document tells what there is, and bytes are read as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierload.engine.loading import Source, fill
from tierload.state import Outline, Unread, Wanted
from tierload.types import Commit

__all__ = ["CommitReader"]


class CommitReader:
    """What one commit holds. ``state`` is its outline: dicts and lists as they are, every tensor on the meta device,
    ``Unread`` for other values that need bytes. Of values that each rank has of its own it shows those of one rank.
    The store has to stay open meanwhile."""

    def __init__(self, source: Source, outline: Outline, *, threads: int, rank: int) -> None:
        self._source = source
        self._outline = outline
        self._threads = threads
        self._rank = rank

    @property
    def commit(self) -> Commit:
        """The commit that is read."""
        return self._source.commit

    @property
    def state(self) -> Any:
        """The outline."""
        return self._outline.state

    def read(self, wanted: Sequence[Wanted], *, cast: bool = False) -> None:
        """Reads boxes of tensors of the outline into tensors of the same sizes, on any device, and verifies every page
        that this touches. ``cast`` allows conversion between floating dtypes.

        Raises:
            KeyMismatch: Sizes or dtypes differ: all of them are listed, and nothing was read.
            CorruptPage: A page is damaged; the error says where, and what had been overwritten.
        """
        self._outline.compare(wanted, cast=cast)
        for plan in self._outline.plan_boxes(wanted):
            fill(self._source, plan, self._threads, self._rank)
            plan.finish()

    def values(self, unread: Sequence[Unread]) -> list[Any]:
        """The values that the outline has no more than marks of.

        Raises:
            UnsupportedValue: One was pickled, and pickles are not allowed.
            CorruptPage: A page is damaged.
        """
        plan = self._outline.plan_values(unread)
        fill(self._source, plan, self._threads, self._rank)
        found = plan.finish()
        assert isinstance(found, list)
        return found
