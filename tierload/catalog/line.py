"""The head's line: the commits that its state continues, newest first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Line"]


class _Record(Protocol):
    @property
    def txid(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def rollback(self) -> bool: ...


class Line:
    """Which commits belong to the head's line, given all commits of a store.

    A commit continues the one before it in the journal, unless it is a rollback, which continues its source: commits
    between the two are *superseded*. Commits that collection dropped are simply stepped over; rollbacks stay for as
    long as a commit that they left behind does, so the line can always be told.

    ``positions`` is the line as a person counts it: a rollback and the source it restored are one position.
    """

    def __init__(self, records: Iterable[_Record], head: int) -> None:
        by_txid = {record.txid: record for record in records}
        order = sorted(by_txid)
        self.txids: list[int] = []
        self.positions: list[int] = []
        at = head if head in by_txid else 0
        restored = 0
        while at:
            self.txids.append(at)
            if at != restored:
                self.positions.append(at)
            record = by_txid[at]
            below = record.source + 1 if record.rollback else at
            restored = record.source if record.rollback else 0
            place = bisect_left(order, below)
            at = order[place - 1] if place else 0
        self._members = set(self.txids)

    def append(self, txid: int) -> None:
        """A commit that is no rollback has been added: it continues the head's line, and is the head."""
        self.txids.insert(0, txid)
        self.positions.insert(0, txid)
        self._members.add(txid)

    def __contains__(self, txid: object) -> bool:
        return txid in self._members
