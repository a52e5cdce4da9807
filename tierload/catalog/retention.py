"""Which commits may be dropped. Ordered by the journal alone: never by time stamps, names or steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real

from tierload.catalog.line import Line
from tierload.errors import InvalidRequest
from tierload.types import Commit

__all__ = ["choose_dropped", "parse_best"]


def choose_dropped(
    commits: Sequence[Commit],
    line: Line,
    sources: Mapping[int, int],
    *,
    keep: int,
    keep_every: int | None = None,
    keep_best: str | None = None,
) -> tuple[Commit, ...]:
    """The commits that a retention of ``keep`` drops, oldest first.

    Kept are, of the head's line: the newest ``keep`` positions, those whose step is a multiple of ``keep_every``, the
    one with the best value of a metric (``keep_best="loss:min"`` or ``"accuracy:max"``; of equal ones the newest), and
    the *last good* one: the newest that has numbers among its metrics, all of them finite. Kept are also every tagged
    commit, and rollbacks that still tell the line from a kept commit which they left behind. Commits that a rollback
    superseded are dropped unless they are tagged. ``sources`` maps the txids of rollbacks to those they went back to.

    Raises:
        InvalidRequest: ``keep`` or ``keep_every`` is less than 1, which would leave nothing, or ``keep_best`` does not
            say which values are better.
    """
    if keep < 1:
        raise InvalidRequest(f"keep is {keep}; at least 1 commit is always kept, so use 1 or more")
    if keep_every is not None and keep_every < 1:
        raise InvalidRequest(f"keep_every is {keep_every}; use a number of steps from 1 up")
    kept = set(line.positions[:keep])
    kept.update(_proven([commit for commit in commits if commit.txid in line], keep_best))
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


def parse_best(keep_best: str) -> tuple[str, bool]:
    """The metric, and whether its lower values are better.

    Raises:
        InvalidRequest: It is neither ``METRIC:min`` nor ``METRIC:max``.
    """
    metric, _, best = keep_best.rpartition(":")
    if not metric or best not in ("min", "max"):
        name = metric or keep_best or "loss"
        raise InvalidRequest(f'keep_best is {keep_best!r}; say which values are better: "{name}:min" or "{name}:max"')
    return metric, best == "min"


def _proven(line: Sequence[Commit], keep_best: str | None) -> set[int]:
    """The last good commit of the line, and the best one."""
    newest_first = sorted(line, key=lambda commit: -commit.txid)
    numbers = [(commit.txid, _numbers(commit)) for commit in newest_first]
    good = (txid for txid, found in numbers if found and all(map(_is_finite, found.values())))
    kept = {txid for txid in (next(good, None),) if txid is not None}
    if keep_best is not None:
        metric, lower = parse_best(keep_best)
        values = [(found[metric], txid) for txid, found in numbers if _is_finite(found.get(metric, math.nan))]
        if values:
            best = (min if lower else max)(value for value, _ in values)
            kept.add(max(txid for value, txid in values if value == best))
    return kept


def _is_finite(value: Real | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # an int may be too large for a float


def _numbers(commit: Commit) -> dict[str, Real]:
    metrics = commit.metrics.items()
    return {name: value for name, value in metrics if isinstance(value, Real) and not isinstance(value, bool)}
