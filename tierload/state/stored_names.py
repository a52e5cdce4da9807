"""What a store calls the tensors of a live module: as they are without its wrappers, or as they were in those that the
module was in when somebody took its ``state_dict()``."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tierload.state.keys import Path
from tierload.state.members import entries, nodes_of
from tierload.state.wrappers import ADVICE, BareNames, has_wrapper_element, told, unwrapped_module

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["StoredNames"]


class StoredNames:
    """Names for what a module has: those in the store, and for what is not there, the bare ones.

    ``own`` are the names that the module's ``state_dict()`` gives; ``tag`` and ``content``, what is stored.
    """

    def __init__(self, binder: Binder, module: torch.nn.Module, own: Iterable[str], tag: str, content: Any, path: Path):
        self.bare = BareNames(module)
        bare = self.bare.unique(own)
        nodes = nodes_of(tag, content)
        if nodes is None:
            nodes = {key: node for key, _, node in entries(binder.reader, tag, content, path)}
        names = set(bare.values())
        stored = {} if nodes.keys() == names else unwrapped_module([name for name in nodes if type(name) is str], names)
        self._own = {stored.get(name, name): raw for raw, name in bare.items()}
        self._stored = stored
        self._changed = bool(self.bare.wrappers or stored)
        notes = [told(self.bare.wrappers)] if self.bare.wrappers else []
        if stored:
            notes.append(f"{len(stored)} names of the store are read without the elements of wrappers")
        self.note = f"{path.shown()}: {'; '.join(notes)}" if notes else ""
        if any(has_wrapper_element(name) for name in nodes.keys() - self._own.keys() if type(name) is str):
            binder.problems.advise(ADVICE)

    def named(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """What ``state_dict()`` gave, by these names."""
        return {name: own[raw] for name, raw in self._own.items()}

    def own(self, name: str) -> str:
        """The module's own name for what the store calls ``name``; for a name that only its hooks know, one beside its
        neighbours'."""
        found = self._own.get(name)
        if found is not None or not self._changed:
            return name if found is None else found
        above, _, last = name.rpartition(".")
        neighbour = next((raw for stored, raw in self._own.items() if stored.rpartition(".")[0] == above), name)
        return ".".join(filter(None, (neighbour.rpartition(".")[0], last)))

    def metadata(self, stored: Any) -> Any:
        """Stored ``_metadata`` by the module's own paths."""
        if not self._changed or not isinstance(stored, Mapping):
            return stored
        above = {bare.rpartition(".")[0]: name.rpartition(".")[0] for bare, name in self._stored.items()}
        paths = self.bare.modules().items()
        own = {raw: stored[above.get(path, path)] for path, raw in paths if above.get(path, path) in stored}
        return collections.OrderedDict({**stored, **own})
