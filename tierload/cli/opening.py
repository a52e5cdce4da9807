"""Opening a store for a command, and what commands need of an open one beyond its public methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from tierload.cli.exits import DAMAGED
from tierload.cli.output import warn
from tierload.cli.text import clean, command
from tierload.errors import InvalidRequest, StoreBusy
from tierload.types import ChunkInfo

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["dtype_name", "reading", "recorded_at", "writing"]


@contextmanager
def reading(path: str) -> Iterator[Store]:
    """A store as it was when it was opened; a writer beside it is not disturbed.

    When its journal is damaged, what it shows is an older state: that is said, and the exit code is that of damage.
    """
    from tierload.engine import Store

    with Store(path, mode="r") as store:
        for text in [*store.warnings, *([store.damage] if store.damage else [])]:
            warn(f"{clean(text)}; more: {command('verify', path)}")
        yield store
        if store.damage:
            warn("commits after the damage are not shown, and the store opens for reading only")
            raise typer.Exit(DAMAGED)


def writing(path: str) -> Store:
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
        raise StoreBusy(f"{error}; log, show, diff, verify and --dry-run work meanwhile") from None


def recorded_at(store: Store, lsn: int) -> dict[str, object] | None:
    """The recorded values as they were at an LSN, or None when the journal does not reach back to it."""
    try:
        return store.recorded(lsn=lsn)
    except InvalidRequest:
        return None


def dtype_name(info: ChunkInfo) -> str:
    """The name of a stored tensor's dtype."""
    from tierload.state.dtypes import CODE_NAMES

    return CODE_NAMES.get(info.dtype, f"code {info.dtype}")
