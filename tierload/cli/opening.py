"""Opening a store for a command, and what commands need of an open one beyond its public methods."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tierload.cli.output import warn
from tierload.cli.text import clean
from tierload.errors import InvalidRequest, StoreBusy
from tierload.types import ChunkInfo, Commit

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["dtype_name", "open_to_read", "open_to_write", "recorded_at", "stored_bytes"]


def open_to_read(path: str, *, warnings: bool = True) -> Store:
    """A store as it was when it was opened; a writer beside it is not disturbed."""
    from tierload.engine import Store

    store = Store(path, mode="r")
    if warnings:
        for text in [*store.warnings, *([store.damage] if store.damage else [])]:
            warn(f"{clean(text)}; `tierload verify` says more")
    return store


def open_to_write(path: str) -> Store:
    """A store that this process holds until it is closed.

    Raises:
        StoreNotFound: There is none; opening for writing would make one.
        StoreBusy: Another process holds it; the message names it and says what to do.
    """
    from tierload.engine import Store

    Store(path, mode="r").close()
    try:
        return Store(path, mode="w")
    except StoreBusy as error:
        raise StoreBusy(_busy(path, str(error))) from None


def _busy(path: str, message: str) -> str:
    advice = "wait until it ends, or stop it; log, show, diff, verify and --dry-run work meanwhile"
    start = message.find("{")
    try:
        holder = json.loads(message[start:]) if start >= 0 else None
    except ValueError:
        holder = None
    if not isinstance(holder, dict):
        return f"{message}: {advice}"
    host, pid, since, command = (holder.get(name, "unknown") for name in ("host", "pid", "since", "command"))
    return f"{path} is held by process {pid} ({command}) on {host} since {since}: {advice}"


def recorded_at(store: Store, lsn: int) -> dict[str, object] | None:
    """The recorded values as they were at an LSN, or None when the journal does not reach back to it."""
    from tierload.engine.values import decode_recorded

    try:
        found = store._native.state_at(lsn)[1]
    except InvalidRequest:
        return None
    return {key.decode("utf-8", "surrogatepass"): decode_recorded(value)[0] for key, value in found.items()}


def stored_bytes(store: Store, commit: Commit) -> int:
    """How many bytes the commit's pages have in segments, those that it shares with other commits too."""
    import numpy as np

    from tierload.engine.loading import table_of

    pages = table_of(store._native.manifest(commit.txid)).pages[["segment", "offset", "stored_length"]]
    return int(np.unique(pages)["stored_length"].sum())


def dtype_name(info: ChunkInfo) -> str:
    """The name of a stored tensor's dtype."""
    from tierload.state.dtypes import CODE_NAMES

    return CODE_NAMES.get(info.dtype, f"code {info.dtype}")
