"""Which commits may be dropped. Ordered by the journal alone: never by time stamps, names or steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierload.catalog.line import Line
from tierload.errors import InvalidRequest
from tierload.types import Commit

__all__ = ["choose_dropped"]


def choose_dropped(
    commits: Sequence[Commit],
    line: Line,
    sources: Mapping[int, int],
    *,
    keep: int,
    keep_every: int | None = None,
) -> tuple[Commit, ...]:
    """The commits that a retention of ``keep`` drops, oldest first.

    Kept are: the newest ``keep`` positions of the head's line, those whose step is a multiple of ``keep_every``, every
    tagged commit, and rollbacks that still tell the line from a kept commit which they left behind. Commits that a
    rollback superseded are dropped unless they are tagged. ``sources`` maps the txids of rollbacks to those they went
    back to.

    Raises:
        InvalidRequest: ``keep`` or ``keep_every`` is less than 1, which would leave nothing.
    """
    if keep < 1:
        raise InvalidRequest(f"keep is {keep}; at least 1 commit is always kept, so use 1 or more")
    if keep_every is not None and keep_every < 1:
        raise InvalidRequest(f"keep_every is {keep_every}; use a number of steps from 1 up")
    kept = set(line.positions[:keep])
    for commit in commits:
        marked = keep_every is not None and commit.txid in line and (commit.step or 0) % keep_every == 0
        if commit.head or commit.tags or (marked and commit.step is not None):
            kept.add(commit.txid)
    # A rollback that went back to a kept rollback's source is the same state, which only its record says. Newest first,
    # for these point back; then in journal order, so that one that stays is seen before those that left it behind.
    before = -1
    while len(kept) != before:
        before = len(kept)
        for txid in sorted(sources, reverse=True):
            if txid in kept and sources[txid] in sources:
                kept.add(sources[txid])
        for txid in sorted(sources):
            if any(sources[txid] < other < txid for other in kept):
                kept.add(txid)
    return tuple(sorted((c for c in commits if c.txid not in kept), key=lambda c: c.txid))
