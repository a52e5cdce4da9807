"""Every error that tierload raises on purpose: one tree, each class also a builtin kind.

Messages say what was found, where (store, commit, key, page, file and offset), and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = [
    "AcceleratorError",
    "CommitDropped",
    "CommitNotFound",
    "CorruptFile",
    "CorruptPage",
    "CorruptStore",
    "HotStartClosed",
    "HotStartTimeout",
    "InvalidRequest",
    "KeyMismatch",
    "RankFailed",
    "RankLost",
    "RanksDisagree",
    "SaveCancelled",
    "SaveSkipped",
    "SaveTimeout",
    "StoreBusy",
    "StoreFenced",
    "StoreIOError",
    "StoreNotFound",
    "StorePoisoned",
    "TierloadError",
    "TornSave",
    "UnsupportedFormat",
    "UnsupportedValue",
]


class TierloadError(Exception):
    """Base of every error that tierload raises on purpose."""


class StoreNotFound(TierloadError, FileNotFoundError):
    """The path holds no store."""


class CommitNotFound(TierloadError, LookupError):
    """No commit of the store matches the step, tag, id or LSN that was asked for."""


class InvalidRequest(TierloadError, ValueError):
    """What was asked for makes no sense for this store; the message says why."""


class StoreBusy(TierloadError, BlockingIOError):
    """Another process writes to this store; the message names it.

    ``holder`` is what that process wrote into LOCK: ``host``, ``pid``, ``command``, ``since``; empty when unknown.
    """

    def __init__(self, message: str, *, holder: str = "") -> None:
        try:
            known = json.loads(holder)
        except ValueError:
            known = None
        self.holder: dict[str, object] = known if isinstance(known, dict) else {}
        if self.holder:
            host, pid, command, since = (self.holder.get(k, "unknown") for k in ("host", "pid", "command", "since"))
            message += f": process {pid} ({command}) on {host} since {since}"
        message += "; wait until it ends, or stop it (take_over=True is for one that is frozen)"
        super().__init__(message)


class StoreFenced(TierloadError, RuntimeError):
    """Another writer took the store over; what this one did since does not count."""


class StorePoisoned(TierloadError, RuntimeError):
    """An earlier write or sync failed; this writer acknowledges nothing more. Open the store anew."""


class StoreIOError(TierloadError, OSError):
    """The operating system refused an operation. ``errno`` and ``filename`` are set."""


class AcceleratorError(TierloadError, RuntimeError):
    """An accelerator or its driver has failed, or is not there."""


class SaveCancelled(TierloadError, RuntimeError):
    """The save was cancelled before it was committed; nothing of it is kept."""


class SaveSkipped(TierloadError, RuntimeError):
    """Earlier saves were still under way and ``on_busy="skip"`` was set, so this one was never begun."""


class SaveTimeout(TierloadError, TimeoutError):
    """A save in the background takes longer than the caller wanted to wait; it goes on."""


class HotStartTimeout(TierloadError, TimeoutError):
    """What is to arrive in a hot start is not there within the time; it is still on its way."""


class HotStartClosed(TierloadError, RuntimeError):
    """A tensor is used that was not there yet when its hot start was closed; a load into the model completes it."""


class RankFailed(TierloadError, RuntimeError):
    """Another rank of the job failed with an error that is none of tierload's; the message names rank and error."""


class RankLost(TierloadError, TimeoutError):
    """Ranks of the job have ended, say nothing for too long or have gone on by themselves; nothing was agreed on.

    ``ranks`` are those.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RanksDisagree(TierloadError, ValueError):
    """What has to be the same on every rank of the job is not.

    ``differences`` are all of them; the message shows the first ten.
    """

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        self.differences = tuple(differences)
        if self.differences:
            message += ": " + "; ".join(self.differences[:10])
        if len(self.differences) > 10:
            message += f"; and {len(self.differences) - 10} more"
        super().__init__(message)


class TornSave(TierloadError, RuntimeError):
    """Guarded tensors changed outside of their optimizer's step while a save was copying them; nothing was committed.

    ``keys`` are those that changed.
    """

    def __init__(self, message: str, *, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class CorruptStore(TierloadError, OSError):
    """Metadata on disk is not what was written; the store opens for reading only."""


class CommitDropped(CommitNotFound):
    """A collection dropped the commit after this reader was opened; open the store anew."""


class CorruptPage(CorruptStore):
    """A page of data is not what was written.

    ``commit``, ``key``, ``page``, ``path`` and ``offset`` say where; ``overwritten`` lists the keys of the target of
    ``load(into=...)`` that had already been filled, in whole or in part, when the page was found.
    """

    def __init__(
        self,
        message: str,
        *,
        commit: str = "",
        key: str = "",
        page: int = -1,
        path: str = "",
        offset: int = -1,
        overwritten: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.commit = commit
        self.key = key
        self.page = page
        self.path = path
        self.offset = offset
        self.overwritten = tuple(overwritten)


class CorruptFile(TierloadError, ValueError):
    """A file to import is damaged or hostile, or one that was exported does not read back as what was written."""


class UnsupportedFormat(TierloadError, ValueError):
    """The store was written by a newer release; the message names the release that reads it."""


class UnsupportedValue(TierloadError, TypeError):
    """A value in the state cannot be stored; the message names its path inside the state and its type."""


class KeyMismatch(TierloadError, KeyError):
    """The store and the target of a load differ; every difference is listed and nothing was changed.

    ``missing`` (in the target, not in the store), ``unexpected`` (the reverse), ``shapes`` and ``dtypes`` hold keys.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shapes: Sequence[str] = (),
        dtypes: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.shapes = tuple(shapes)
        self.dtypes = tuple(dtypes)

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return str(self.args[0])
