"""Loading into dicts, lists, tuples and dataclasses: entry by entry, so that what they hold is filled in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tierload.state.assembly import read_compound
from tierload.state.containers import key_element
from tierload.state.keys import Path
from tierload.state.members import entries
from tierload.state.nodes import tag_of
from tierload.state.registry import is_named_tuple
from tierload.state.targets import Put, attribute_put, fields_of_target, is_mutable, item_put, leaves_of_target

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["MAPPINGS", "bind_fields", "bind_mapping", "bind_sequence", "kind_of_node"]

MAPPINGS = frozenset("d map odict statedict ddict counter".split())
"""Tags of dicts."""

_SEQUENCES = frozenset("list tuple deque named".split())

_KINDS = {"": "a plain value", "t": "a tensor", "list": "a list", "tuple": "a tuple", "object": "an object"} | (
    dict.fromkeys(MAPPINGS, "a dict")
)
"""Tags in words."""


def kind_of_node(node: object, path: Path) -> str:
    """What stands in the store, in words."""
    tag, content = tag_of(node)
    return read_compound(content, path).told() if tag == "compound" else _KINDS.get(tag, f"a value of tag {tag!r}")


def bind_mapping(binder: Binder, live: dict[Any, Any], node: object, path: Path) -> None:
    """Bind a dict entry by entry; an empty one takes everything that is stored."""
    tag, content = tag_of(node)
    if tag == "object" and "state" in content:
        tag, content = tag_of(content["state"])
    if tag not in MAPPINGS:
        binder.mismatch("a dict", node, path)
        return
    if not live:
        if binder.wants_any(node, path):
            binder.reader.value(node, path)
            binder.actions.append(lambda: live.update(binder.reader.value(node, path)))
            binder.loaded += binder.leaves(node, path) or [path]
        return
    stored, rest = binder.bind_alike(live, tag, content, path)
    _bind_pairs(
        binder, [(key, path.child(key_element(key, path)), live[key], item_put(live, key)) for key in rest], stored
    )


def bind_sequence(binder: Binder, live: Any, node: object, path: Path) -> None:
    """Bind a list, tuple or deque element by element."""
    tag, content = tag_of(node)
    if tag not in _SEQUENCES:
        binder.mismatch(f"a {type(live).__name__}", node, path)
        return
    nodes = entries(binder.reader, tag, content, path)
    stored = {number: (place, inner) for number, (_, place, inner) in enumerate(nodes)}
    names = type(live)._fields if is_named_tuple(type(live)) else range(len(live))
    fixed = isinstance(live, tuple)
    _bind_pairs(
        binder,
        [
            (number, path.child(names[number]), value, None if fixed else item_put(live, number))
            for number, value in enumerate(live)
        ],
        stored,
    )


def bind_fields(binder: Binder, live: Any, node: object, path: Path) -> None:
    """Bind a dataclass field by field."""
    tag, content = tag_of(node)
    if tag not in ("data", "d"):
        binder.mismatch("a dataclass", node, path)
        return
    stored = {name: (place, inner) for name, place, inner in entries(binder.reader, tag, content, path)}
    mutable = is_mutable(live)
    _bind_pairs(
        binder,
        [
            (name, path.child(name), value, attribute_put(live, name) if mutable else None)
            for name, value in fields_of_target(live)
        ],
        stored,
    )


def _bind_pairs(
    binder: Binder, live: Iterable[tuple[Any, Path, Any, Put | None]], stored: dict[Any, tuple[Path, object]]
) -> None:
    """Bind what both sides have, and report the rest."""
    for key, place, value, put in live:
        found = stored.pop(key, None)
        if found is not None:
            binder.push(value, found[1], found[0], put)
            continue
        for leaf in leaves_of_target(value, place):
            if binder.reader.wants(leaf):
                binder.problems.missing(leaf)
    for place, node in stored.values():
        for leaf in binder.leaves(node, place):
            binder.problems.unexpected(leaf)
