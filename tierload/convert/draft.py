"""Files, and folders, under temporary names that appear together, whole and durable, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Draft", "DraftFolder"]


class Draft:
    """New files of one folder (made when it is not there). Leaving the context without ``publish`` removes them.

    A file has the mode that the umask gives, or that of the file it replaces.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []  # folders, the outermost first
        self._files: list[tuple[Path, Path, int]] = []

    def __enter__(self) -> Self:
        missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._made = missing[::-1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for temporary, _, _ in self._files:
            temporary.unlink(missing_ok=True)
        if error is not None:
            for folder in reversed(self._made):
                with contextlib.suppress(OSError):  # somebody put something there meanwhile
                    folder.rmdir()

    def file(self, name: str) -> Path:
        """The temporary path of a file that will be called ``name``; it exists, and is empty."""
        final = self._folder / name
        temporary = self._folder / f".{name}.{secrets.token_hex(4)}.tmp"  # process ids are used again
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(final.stat().st_mode)
        self._files.append((temporary, final, mode))
        return temporary

    def publish(self, *, instead_of: tuple[Path, ...] = ()) -> tuple[Path, ...]:
        """Makes the files durable and gives them their names, in the order in which they were asked for.

        ``instead_of`` are files that the new ones take the place of; those of other names are removed first, so that
        no moment shows a mix of the two.
        """
        for temporary, _, mode in self._files:
            temporary.chmod(mode)  # safetensors replaces the file by one of 0600
            _sync(temporary)
        finals = [final for _, final, _ in self._files]
        for old in instead_of:
            if len(finals) > 1 or old not in finals:
                old.unlink(missing_ok=True)
        for temporary, final, _ in self._files:
            temporary.replace(final)
        self._files.clear()
        for folder in (self._folder, *(made.parent for made in self._made)):
            _sync(folder)
        return tuple(finals)


class DraftFolder:
    """A new folder under a temporary name, ``path``. Leaving the context without ``publish`` removes it."""

    def __init__(self, final: Path) -> None:
        self._final = final
        self.path = final.parent / f".{final.name}.{secrets.token_hex(4)}.tmp"

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # after ``publish`` that is what was there before

    def publish(self) -> None:
        """Makes the folder and the files in it durable and gives it its name, in the place of what has that. Killed
        between two renames, it leaves that beside it, under a hidden name."""
        for file in self.path.iterdir():
            _sync(file)
        _sync(self.path)
        if self._final.exists():
            old = self.path.with_suffix(".old")
            self._final.rename(old)
            try:
                self.path.rename(self._final)
            except BaseException:
                old.rename(self._final)
                raise
            old.rename(self.path)
        else:
            self.path.rename(self._final)
        _sync(self._final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
