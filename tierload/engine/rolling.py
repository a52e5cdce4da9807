"""Going back: what a rollback will change, and doing it."""

from __future__ import annotations

from tierload import _native
from tierload.catalog import CatalogView, decode_text
from tierload.engine import values
from tierload.types import Commit, RollbackPlan

__all__ = ["commit_rollback", "plan_rollback"]


def plan_rollback(native: _native.Store, view: CatalogView, target: Commit, past: _native.CatalogState) -> RollbackPlan:
    """What going back to ``target``, with the values of ``past``, changes. Nothing is written."""
    head = view.find()
    then, now = past.values, native.values()
    changed = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)}
    after = view.line_of(target)
    left = [view[txid] for txid in view.line.txids if txid not in after]
    return RollbackPlan(
        head=head,
        target=target,
        superseded=tuple(left),
        values=tuple(sorted(decode_text(key) for key in changed)),
    )


def commit_rollback(native: _native.Store, plan: RollbackPlan, past: _native.CatalogState) -> int:
    """Commits a planned rollback; returns the new commit's txid."""
    meta = values.encode_meta(values.meta_of(dict(plan.target.metrics), plan.target.note))
    return native.rollback(past, meta).txid
