"""Loading into what is set as one thing: arrays, random generators, files, and objects with ``load_state_dict``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tierload.state import files, rng
from tierload.state.container_binding import MAPPINGS
from tierload.state.keys import Path
from tierload.state.nodes import tag_of

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["bind_array", "bind_files", "bind_generator", "bind_stateful"]


def bind_array(binder: Binder, live: np.ndarray[Any, Any], node: object, path: Path) -> None:
    """Bind a numpy array: its elements are overwritten."""
    if tag_of(node)[0] != "ndarray":
        binder.mismatch("an array", node, path)
    elif binder.reader.wants(path):
        value = binder.reader.unfiltered(node, path)
        if value.shape != live.shape:
            binder.problems.shapes(path, f"has shape {live.shape} in the target and {value.shape} in the store")
        elif value.dtype != live.dtype:
            binder.problems.dtypes(path, f"is {live.dtype} in the target and {value.dtype} in the store")
        elif not live.flags.writeable:
            binder.problems.unexpected(path, "is an array in the target that cannot be written to")
        else:
            binder.actions.append(lambda: np.copyto(live, value))
            binder.loaded.append(path)


def bind_stateful(binder: Binder, live: Any, node: object, path: Path) -> None:
    """Bind an object with ``load_state_dict``, which is given all that is stored for it."""
    tag, content = tag_of(node)
    if tag == "object" and "state" in content:
        node = content["state"]
    elif tag not in MAPPINGS:
        binder.mismatch(f"a {type(live).__qualname__}", node, path)
        return
    if binder.wants_any(node, path):
        binder.reader.unfiltered(node, path)
        binder.actions.append(lambda: live.load_state_dict(binder.reader.unfiltered(node, path)))
        binder.loaded += binder.leaves(node, path) or [path]


def bind_generator(binder: Binder, live: Any, node: object, path: Path) -> None:
    """Bind a random number generator; its state is set after everything else."""
    tag, content = tag_of(node)
    kind = rng.kind_of(live)
    if tag != "rng" or content["kind"] != kind:
        binder.mismatch(f"a generator ({kind})", node, path)
        return
    if not binder.reader.wants(path):
        return
    state = content["state"]
    why = rng.mismatch(live, binder.reader.unfiltered(state, path.inner()))
    if why:
        binder.problems.dtypes(path, why)
        if kind != "all":
            return
    binder.last.append(lambda: rng.restore(live, binder.reader.unfiltered(state, path.inner())))
    binder.loaded.append(path)


def bind_files(binder: Binder, live: files.File | files.Folder, node: object, path: Path) -> None:
    """Bind a file or folder, which is written to where it stands."""
    if tag_of(node)[0] != ("file" if isinstance(live, files.File) else "folder"):
        binder.mismatch(repr(live), node, path)
    elif binder.reader.wants(path):
        stored: Any = binder.reader.unfiltered(node, path)
        why = live.refuses()
        if why:
            binder.problems.unexpected(path, why)
            return
        binder.actions.append(lambda: live.receive(stored.entry()))
        binder.loaded.append(path)
