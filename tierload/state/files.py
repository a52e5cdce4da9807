"""Files and folders as values of a state: read when it is saved, written where the user says after it is loaded."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from tierload.errors import CorruptStore, UnsupportedValue
from tierload.state.keys import Path

__all__ = [
    "Entry",
    "File",
    "FileEntry",
    "Folder",
    "FolderEntry",
    "LinkEntry",
    "check_name",
    "check_tree",
    "read_file",
    "read_folder",
]

_DEPTH_MAX = 100
_HOPS_MAX = 40
_NAME_BYTES_MAX = 255
_TARGET_MAX = 4096

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class FileEntry:
    """A file's content, its permission bits, and outside a folder its name."""

    content: Bytes
    mode: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """A symbolic link."""

    target: str


@dataclass(slots=True)
class FolderEntry:
    """What a folder holds, by name."""

    entries: dict[str, FileEntry | LinkEntry | FolderEntry] = field(default_factory=dict)


Entry = FileEntry | LinkEntry | FolderEntry


class File:
    """A file as a value: ``File("tokenizer.json")`` in a state is stored with its content.

    A loaded one holds the content; ``write_to`` puts it into a directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: FilePath | None = FilePath(path)
        self._entry: FileEntry | None = None

    @classmethod
    def loaded(cls, entry: FileEntry) -> File:
        """A file that came from a store."""
        value = cls(entry.name)
        value.path, value._entry = None, entry
        return value

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self._entry.name if self._entry is not None else FilePath(str(self.path)).name

    def read_bytes(self) -> bytes:
        """Its content."""
        return self.entry().content.tobytes()

    def write_to(self, directory: str | os.PathLike[str]) -> FilePath:
        """Write it into ``directory``, which is made if it does not exist, under its own name; gives the path.

        Raises:
            FileExistsError: There is something of this name.
        """
        entry = self.entry()
        os.makedirs(directory, exist_ok=True)
        _write_tree(FolderEntry({entry.name: entry}), directory)
        return FilePath(directory) / entry.name

    def refuses(self) -> str:
        """Why a load into it would be refused; empty when it is not."""
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            return f"would be written to {self.path}, which is no place for a file"
        return ""

    def receive(self, entry: FileEntry) -> None:
        """Take the content of a stored file: to where this one stands, replacing what is there in one step."""
        if self.path is None:
            self._entry = entry
            return
        staged = FilePath(tempfile.mkdtemp(prefix=".tierload-", dir=self.path.parent))
        try:
            _write_tree(FolderEntry({"file": entry}), staged)
            os.replace(staged / "file", self.path)
        finally:
            shutil.rmtree(staged)

    def entry(self) -> FileEntry:
        """Its content and mode, read from disk where it is not a loaded one."""
        if self._entry is not None:
            return self._entry
        path = FilePath(str(self.path))
        return FileEntry(*_content(path), name=path.name)

    def __repr__(self) -> str:
        return f"tierload.File({self.name!r})"


class Folder:
    """A folder as a value: ``Folder("tokenizer")`` in a state is stored with all that is in it.

    Symbolic links that stay inside the folder are stored as links, others as the files that they lead to. A loaded
    folder holds its content; ``write_to`` puts it into a directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: FilePath | None = FilePath(path)
        self._entry: FolderEntry | None = None

    @classmethod
    def loaded(cls, entry: FolderEntry) -> Folder:
        """A folder that came from a store."""
        value = cls("")
        value.path, value._entry = None, entry
        return value

    def entry(self, notes: list[str] | None = None) -> FolderEntry:
        """Its tree, read from disk where it is not a loaded one."""
        if self._entry is not None:
            return self._entry
        return _scan(FilePath(str(self.path)), [] if notes is None else notes)

    def refuses(self) -> str:
        """Why a load into it would be refused; empty when it is not."""
        if self.path is None or not os.path.lexists(self.path):
            return ""
        if not self.path.is_dir() or any(self.path.iterdir()):
            return f"would be written to {self.path}, which exists and is not an empty folder"
        return ""

    def receive(self, entry: FolderEntry) -> None:
        """Take the content of a stored folder: to where this one stands, which is empty or does not exist."""
        if self.path is None:
            self._entry = entry
        else:
            Folder.loaded(entry).write_to(self.path)

    def names(self) -> list[str]:
        """The paths of all files and links in it, relative to it."""
        return [name for name, entry in _walk(self.entry()) if not isinstance(entry, FolderEntry)]

    def write_to(self, directory: str | os.PathLike[str]) -> FilePath:
        """Write its content into ``directory``, which is made if it does not exist; gives the path.

        Raises:
            FileExistsError: Something of the name of a file or link is there already.
        """
        entry = self.entry()
        os.makedirs(directory, exist_ok=True)
        _write_tree(entry, directory)
        return FilePath(directory)

    def __repr__(self) -> str:
        return f"tierload.Folder({str(self.path) if self.path is not None else self.names()!r})"


def read_file(value: File, path: Path) -> FileEntry:
    """The entry of a file in a state.

    Raises:
        UnsupportedValue: It is no regular file.
        OSError: It cannot be read.
    """
    try:
        return value.entry()
    except _Refused as error:
        raise UnsupportedValue(f"{path.shown()} (key {path.text()!r}): {error}") from error


def read_folder(value: Folder, path: Path, notes: list[str]) -> FolderEntry:
    """The entry of a folder in a state; raises like ``read_file``."""
    try:
        return value.entry(notes)
    except _Refused as error:
        raise UnsupportedValue(f"{path.shown()} (key {path.text()!r}): {error}") from error


class _Refused(ValueError):
    """Something on disk is no file, folder or link that can be stored."""


def _content(path: FilePath) -> tuple[Bytes, int]:
    """The bytes and permission bits of a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make us wait
    with open(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _Refused(f"{path} is no regular file; tierload stores files, folders and links")
        return np.frombuffer(stream.read(), np.uint8), stat.S_IMODE(mode) & 0o777


def _scan(root: FilePath, notes: list[str]) -> FolderEntry:
    """The tree of a folder on disk."""
    tree = FolderEntry()
    pending: list[tuple[FilePath, FolderEntry, int]] = [(root, tree, 0)]
    while pending:
        directory, folder, depth = pending.pop()
        if depth > _DEPTH_MAX:
            raise _Refused(f"{directory} is more than {_DEPTH_MAX} folders deep")
        for found in sorted(os.scandir(directory), key=lambda entry: entry.name):
            place = FilePath(found.path)
            if found.is_symlink():
                folder.entries[found.name] = LinkEntry(os.readlink(place))
            elif found.is_dir(follow_symlinks=False):
                inner = folder.entries[found.name] = FolderEntry()
                pending.append((place, inner, depth + 1))
            else:
                folder.entries[found.name] = FileEntry(*_content(place))
    for name, entry in list(_walk(tree)):
        if isinstance(entry, LinkEntry) and _escapes(tree, name.split("/")[:-1], entry.target):
            place = root / name
            if not place.is_file():
                raise _Refused(f"the link {place} leads out of the folder to {entry.target!r}, which is no file")
            holder = _at(tree, name.split("/")[:-1])
            assert isinstance(holder, FolderEntry)
            holder.entries[place.name] = FileEntry(*_content(place))
            notes.append(f"the link {place} leads out of its folder; the file that it leads to is stored in its place")
    return tree


def _walk(tree: FolderEntry) -> Iterator[tuple[str, Entry]]:
    """Everything in a tree with its path, folders before what they hold."""
    pending: list[tuple[str, FolderEntry]] = [("", tree)]
    while pending:
        prefix, folder = pending.pop()
        for name, entry in folder.entries.items():
            yield prefix + name, entry
            if isinstance(entry, FolderEntry):
                pending.append((f"{prefix}{name}/", entry))


def _at(tree: FolderEntry, parts: list[str]) -> Entry | None:
    entry: Entry | None = tree
    for part in parts:
        entry = entry.entries.get(part) if isinstance(entry, FolderEntry) else None
    return entry


def _escapes(tree: FolderEntry, directory: list[str], target: str) -> bool:
    """Whether a link in ``directory`` leads out of the tree, on its own or by way of other links."""
    place, hops = list(directory), 0
    if not target or target.startswith("/") or "\0" in target or len(target) > _TARGET_MAX:
        return True
    ahead = target.split("/")[::-1]
    while ahead:
        part = ahead.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not place:
                return True
            place.pop()
            continue
        entry = _at(tree, [*place, part])
        if not isinstance(entry, LinkEntry):
            place.append(part)
            continue
        hops += 1
        if hops > _HOPS_MAX or entry.target.startswith("/") or len(entry.target) > _TARGET_MAX:
            return True
        ahead.extend(entry.target.split("/")[::-1])
    return False


def check_tree(tree: FolderEntry) -> None:
    """Refuse a tree from a store whose names or links could lead out of the directory that it is written to.

    Raises:
        CorruptStore: No folder that was saved gives such a tree.
    """
    for path, entry in _walk(tree):
        if path.count("/") > _DEPTH_MAX:
            raise CorruptStore(f"a stored folder is more than {_DEPTH_MAX} folders deep")
        if isinstance(entry, LinkEntry) and _escapes(tree, path.split("/")[:-1], entry.target):
            raise CorruptStore(f"a stored folder has a link {path!r} to {entry.target!r}, which leads out of it")


def check_name(name: object) -> str:
    """A name in a folder, or of a file, that a store gave.

    Raises:
        CorruptStore: It is no single part of a path.
    """
    if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CorruptStore(f"a stored file has the name {name!r:.80}")
    try:
        if len(os.fsencode(name)) <= _NAME_BYTES_MAX:
            return name
    except UnicodeEncodeError:
        pass
    raise CorruptStore(f"a stored file has the name {name!r:.80}")


def _write_tree(tree: FolderEntry, directory: str | os.PathLike[str]) -> None:
    """Write a tree below ``directory``. Nothing is overwritten, no link is followed, and links are made last."""
    links: list[tuple[int, str, str]] = []
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    opened = [os.open(directory, flags)]
    try:
        pending: list[tuple[int, FolderEntry]] = [(opened[0], tree)]
        while pending:
            at, folder = pending.pop()
            for name, entry in folder.entries.items():
                if isinstance(entry, LinkEntry):
                    links.append((at, name, entry.target))
                elif isinstance(entry, FileEntry):
                    _write_file(entry, name, at)
                else:
                    with contextlib.suppress(FileExistsError):  # a link or a file is refused by the next line
                        os.mkdir(name, dir_fd=at)
                    opened.append(os.open(name, flags | os.O_NOFOLLOW, dir_fd=at))
                    pending.append((opened[-1], entry))
        for at, name, target in links:
            os.symlink(target, name, dir_fd=at)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _write_file(entry: FileEntry, name: str, at: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=at), "wb") as stream:
        stream.write(entry.content.data)
        os.fchmod(stream.fileno(), entry.mode & 0o777)
