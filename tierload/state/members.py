"""What stands inside the nodes of the document: entries with their keys and places, in writing order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tierload.errors import CorruptStore
from tierload.state.assembly import read_compound
from tierload.state.keys import Part, Path
from tierload.state.nodes import fields_of, tag_of
from tierload.state.scalars import sized

if TYPE_CHECKING:
    from tierload.state.reader import Reader

__all__ = ["COUNTED", "OptimizerNode", "entries", "members", "nodes_of", "optimizer_node", "pairs", "type_fields"]

COUNTED = frozenset(
    "list d map odict statedict ddict counter deque set bytearray blob ndarray data object rng compound".split()
)
"""Tags of the containers that a ``ref`` counts."""


@dataclasses.dataclass(slots=True)
class OptimizerNode:
    """The parts of an optimizer in the document; ``states`` are by position, or by what else torch keys them with.
    ``strangers`` are the places of states by name that are of no parameter of a group."""

    names: list[str | None]
    groups: tuple[object, Path]
    states: list[tuple[Any, object, Path]]
    rest: tuple[object, Path]
    strangers: tuple[Path, ...] = ()


def optimizer_node(reader: Reader, content: object, path: Path) -> OptimizerNode:
    """Check and take apart the ``optimizer`` of an object."""
    labels, groups, states, rest = fields_of(content, "names", "groups", "state", "rest")
    names = [None if label is None else reader.key(label) for label in sized(labels)]
    if any(name is not None and type(name) is not str for name in names) or tag_of(rest)[0] not in ("d", "map"):
        raise CorruptStore(f"{path.shown()} is a damaged optimizer")
    below = path.child("state")
    entries = []
    seen: set[int | str] = set()
    for label, node in (sized(pair, 2) for pair in sized(states)):
        key = reader.key(label)
        if type(key) not in (int, str) or key in seen:
            raise CorruptStore(f"{path.shown()} has a damaged state of {key!r:.40}")
        seen.add(key)
        element = reader.element(label, key)
        if type(key) is int and 0 <= key < len(names):
            element = names[key] or key
        entries.append((key, node, below.child(element)))
    return OptimizerNode(names, (groups, path.child("param_groups")), entries, (rest, path.inner()))


def entries(reader: Reader, tag: str, content: Any, path: Path) -> list[tuple[Any, Path, object]]:
    """Key or index, place and node of everything in a container."""
    if tag == "d":
        if type(content) is not dict:
            raise CorruptStore(f"{path.shown()} is no dict in the state document")
        return [(name, path.child(name), node) for name, node in content.items()]
    if tag in ("list", "tuple"):
        return [(index, path.child(index), node) for index, node in enumerate(sized(content))]
    if tag in ("map", "odict", "counter"):
        return [(key, path.child(element), node) for key, element, node in pairs(reader, content)]
    if tag in ("ddict", "statedict"):
        items, _ = fields_of(content, "items", "factory" if tag == "ddict" else "metadata")
        return [(key, path.child(element), node) for key, element, node in pairs(reader, items)]
    if tag == "deque":
        items, _ = fields_of(content, "items", "maxlen")
        return [(index, path.child(index), node) for index, node in enumerate(sized(items))]
    if tag in ("named", "data"):
        return [(name, path.child(name), node) for name, node in type_fields(content)[1]]
    return []


def nodes_of(tag: str, content: Any) -> dict[Any, Any] | None:
    """The nodes of a mapping by key, where every key is its own value; else None."""
    if tag in ("ddict", "statedict"):
        content = content.get("items") if type(content) is dict else None
        tag = "map"
    if tag == "d" and type(content) is dict:
        return content
    if tag not in ("map", "odict", "counter") or type(content) is not list:
        return None
    try:
        return dict(content)
    except (TypeError, ValueError):  # a typed key, or damage
        return None


def members(reader: Reader, tag: str, content: Any, path: Path) -> list[tuple[Path, object]]:
    """Place and node of everything inside a node, in writing order."""
    below = [(place, node) for _, place, node in entries(reader, tag, content, path)]
    if tag == "statedict":
        return [*below, (path.inner(), content["metadata"])]
    if tag == "object" and type(content) is dict and "optimizer" in content:
        _, optimizer = fields_of(content, "type", "optimizer")
        parts = optimizer_node(reader, optimizer, path)
        states = [(place, node) for _, node, place in parts.states]
        return [(parts.groups[1], parts.groups[0]), *states, (parts.rest[1], parts.rest[0])]
    if tag in ("object", "rng"):
        _, state = fields_of(content, "type" if tag == "object" else "kind", "state")
        return [(path.inner(), state)]
    if tag == "compound":
        compound = read_compound(content, path)
        context = [(path.inner(), compound.context)] if compound.form == "subclass" else []
        return [*context, *((path.child(Part(name)), node) for name, node in compound.parts.items())]
    if tag == "enum":
        return [(path.inner(), fields_of(content, "type", "name", "value")[2])]
    return below


def pairs(reader: Reader, content: object) -> Iterable[tuple[Any, object, object]]:
    """Key, element of the path, and node of each ``[key, value]``."""
    for label, node in (sized(pair, 2) for pair in sized(content)):
        key = reader.key(label)
        yield key, reader.element(label, key), node


def type_fields(content: object) -> tuple[str, list[tuple[str, object]]]:
    """The type's name and the fields of a named tuple or dataclass."""
    name, fields = fields_of(content, "type", "fields")
    found = [(field, node) for field, node in (sized(pair, 2) for pair in sized(fields))]
    names = [field for field, _ in found]
    if type(name) is not str or any(type(field) is not str for field in names) or len(set(names)) != len(names):
        raise CorruptStore(f"the state document has damaged fields of {name!r:.80}")
    return name, found
