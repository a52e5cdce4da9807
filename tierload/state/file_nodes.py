"""Files and folders of the document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tierload.errors import CorruptStore
from tierload.state import files
from tierload.state.keys import DEPTH_MAX, Path
from tierload.state.nodes import fields_of, tag_of
from tierload.state.scalars import sized

if TYPE_CHECKING:
    from tierload.state.reader import Reader

__all__ = ["read_file", "read_folder"]


def read_file(reader: Reader, content: Any, path: Path) -> object:
    """A file; its content may be still to come."""
    return files.File.loaded(_file_entry(reader, content, path, files.check_name(content.get("name"))))


def _file_entry(reader: Reader, content: Any, path: Path, name: str) -> files.FileEntry:
    mode = content["mode"]
    if type(mode) is not int:
        raise CorruptStore(f"{path.shown()} is a damaged file")
    raw = np.empty(0, np.uint8) if content["chunk"] is None else reader.raw(content["chunk"], content, path)
    return files.FileEntry(raw, mode & 0o777, name)


def read_folder(reader: Reader, content: Any, path: Path) -> object:
    """A folder and all that is in it.

    Raises:
        CorruptStore: It has damaged entries, or links that leave it.
    """
    root = files.FolderEntry()
    pending: list[tuple[Any, files.FolderEntry, Path]] = [(content, root, path)]
    while pending:
        inner, folder, place = pending.pop()
        if place.depth > DEPTH_MAX:
            raise CorruptStore(f"the state document nests deeper than {DEPTH_MAX} levels")
        for name, node in (sized(pair, 2) for pair in sized(*fields_of(inner, "entries"))):
            if files.check_name(name) in folder.entries:
                raise CorruptStore(f"{place.shown()} has two entries {name!r}")
            tag, below = tag_of(node)
            if tag == "folder":
                entry = folder.entries[name] = files.FolderEntry()
                pending.append((below, entry, place.child(name)))
            elif tag == "file":
                folder.entries[name] = _file_entry(reader, below, place.child(name), "")
            elif tag == "link" and type(below) is str:
                folder.entries[name] = files.LinkEntry(below)
            else:
                raise CorruptStore(f"{place.shown()} has a damaged entry {name!r}")
    files.check_tree(root)
    return files.Folder.loaded(root)
