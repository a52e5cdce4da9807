"""What a store's writer is doing, for other processes to see: ``tierload top``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tierload.engine.pending import PendingSave
from tierload.types import LiveSave, LiveStatus, SaveProgress

__all__ = ["Live", "look"]

_NAME = "LIVE"
_LOOKS, _PAUSE_SECONDS = 5, 0.01
_BYTES = 4096  # of the file: one write, which a reader sees whole or not at all, but for a moment


class Live:
    """Keeps a small file in the store up to date. It is no part of the format: whatever happens to it, the store is
    whole, and a save goes on where it cannot be written."""

    def __init__(self, store: str) -> None:
        self._path = Path(store, _NAME)

    def show(self, saves: Iterable[PendingSave], skipped: int) -> None:
        """Writes what is in flight."""
        rows = [
            {"step": save.step, "seconds": time.perf_counter() - save.began, **asdict(save.progress)} for save in saves
        ]
        content = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "skipped": skipped}
        text = json.dumps(content | {"saves": rows}).encode()
        while len(text) > _BYTES:  # the newest ones in a long queue have nothing to show yet
            rows.pop()
            text = json.dumps(content | {"saves": rows}).encode()
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o666)
            try:
                os.pwrite(descriptor, text.ljust(_BYTES), 0)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Removes it."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def look(store: str | os.PathLike[str]) -> LiveStatus | None:
    """What the process that writes to a store has in flight; None when it does not save in the background.

    The file stays behind when that process is killed: whether it lives is for the caller to find out.
    """
    for _ in range(_LOOKS):
        try:
            return _status(json.loads(_content(Path(store, _NAME))))
        except PermissionError:
            raise
        except OSError:
            return None  # nothing is there, or no file
        except (ValueError, KeyError, TypeError, RecursionError):
            time.sleep(_PAUSE_SECONDS)  # in the midst of a write, perhaps
    return None  # somebody else's


def _content(path: Path) -> bytes:
    """The first bytes of the file, or what else is in its place and does not make us wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def _status(found: Any) -> LiveStatus:
    saves = tuple(
        LiveSave(row["step"], float(row["seconds"]), SaveProgress(*(row[name] for name in SaveProgress.__slots__)))
        for row in found["saves"]
    )
    return LiveStatus(str(found["host"]), int(found["pid"]), float(found["time"]), int(found["skipped"]), saves)
