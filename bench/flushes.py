"""The flushes that a commit needs, in the order of docs/FORMAT.md section 9, without a store: what durability costs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from bench.measuring import fsync_folder

__all__ = ["CommitFlushes", "one_file_durably"]

_SECTOR = 4096
_JOURNAL_BYTES = 1 << 20


class CommitFlushes:
    """Two new manifest files, their folder, and a sector in each of two files that are filled with zeros already."""

    def __init__(self, folder: Path, manifest_bytes: int) -> None:
        self._folder = folder / "flushes"
        self._folder.mkdir()
        self._manifest = os.urandom(manifest_bytes)
        self._numbers = itertools.count()
        self._journals = []
        for name in "cm":
            path = folder / f"flushes.{name}"
            path.write_bytes(bytes(_JOURNAL_BYTES))
            self._journals.append(os.open(path, os.O_RDWR))
            os.fsync(self._journals[-1])

    def journal(self) -> None:
        """The last part alone: all that a rollback or a recorded value needs."""
        at = next(self._numbers) * _SECTOR % _JOURNAL_BYTES
        for file in self._journals:
            os.pwrite(file, os.urandom(512) + bytes(_SECTOR - 512), at)
        for file in self._journals:
            os.fdatasync(file)

    def commit(self) -> None:
        """All of them, for a commit that writes no page."""
        name = next(self._numbers)
        files = []
        for ending in ("", ".m"):
            files.append(os.open(self._folder / f"{name}{ending}", os.O_CREAT | os.O_EXCL | os.O_RDWR))
            os.pwrite(files[-1], self._manifest, 0)
        for file in files:
            os.fdatasync(file)
        fsync_folder(self._folder)
        self.journal()
        for file in files:
            os.close(file)


def one_file_durably(path: Path, content: bytes) -> None:
    """The usual way to write a small file so that it survives: a new file, synced, renamed, its folder synced."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync_folder(path.parent)
