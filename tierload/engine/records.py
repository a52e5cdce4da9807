"""The journal's records as values for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tierload import _native
from tierload.catalog import decode_text
from tierload.engine import values
from tierload.types import Change

__all__ = ["history"]


def history(native: _native.Store, steps: Mapping[str, int | None]) -> Iterator[Change]:
    """Every kept record, newest first. ``steps`` maps the ids of commits to their steps."""
    for lsn, kind, nanoseconds, key, before, after, _ in native.history(0):
        step = None
        if kind == "change":
            old, new = (values.decode_recorded(v) if isinstance(v, bytes) else (None, None) for v in (before, after))
            before, (after, step) = old[0], new
        commit = after if kind in ("commit", "rollback") and isinstance(after, str) else None
        yield Change(
            lsn=lsn,
            kind=kind,
            time=nanoseconds / 1e9,
            key=decode_text(key),
            before=before,
            after=after,
            step=steps.get(commit) if commit else step,
            commit=commit,
        )
