"""Shapes of stored parameters, by their keys: the states of an optimizer belong to these, whatever shape the live ones
have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tierload.state.keys import ROOT, element_text
from tierload.state.members import entries, nodes_of
from tierload.state.nodes import tag_of

if TYPE_CHECKING:
    from tierload.state.reader import Reader

__all__ = ["StoredShapes"]


class StoredShapes:
    """Looks tensors of a state up; each container is opened once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._inside: dict[str, dict[str, object]] = {}

    def of(self, keys: Iterable[str]) -> tuple[int, ...] | None:
        """The shape of the tensor that has the first of these keys which one has."""
        for key in keys:
            node = self._below(key.rpartition("/")[0]).get(key)
            content = node.get("t") if type(node) is dict else None
            if type(content) is dict:
                shape = content.get("shape")
                return tuple(self._reader.memory.row(content.get("chunk"))[0].shape if shape is None else shape)
        return None

    def _below(self, key: str) -> dict[str, object]:
        """The nodes in a container, by their keys; none where there is no container."""
        at, found = "", self._open("", self._reader.root)
        for element in key.split("/") if key else ():
            at = f"{at}/{element}" if at else element
            found = self._open(at, found.get(at))
            if not found:  # a name need not be the key of anything
                break
        return found

    def _open(self, key: str, node: object) -> dict[str, object]:
        found = self._inside.get(key)
        if found is None:
            found = self._inside[key] = self._nodes(key, node)
        return found

    def _nodes(self, key: str, node: object) -> dict[str, object]:
        tag, content = tag_of(node)
        if tag == "ref":
            tag, content = tag_of(self._reader.target(content))
        if tag == "object" and "state" in content:
            tag, content = tag_of(content["state"])
        start = f"{key}/" if key else ""
        nodes = nodes_of(tag, content)
        if nodes is not None:
            return {start + element_text(name): inner for name, inner in nodes.items()}
        return {start + place.text(): inner for _, place, inner in entries(self._reader, tag, content, ROOT)}
