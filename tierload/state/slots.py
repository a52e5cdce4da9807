"""Where nodes stand in the JSON of a state document, so that they can be exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tierload.state.keys import ROOT, Path
from tierload.state.nodes import SCALARS, tag_of

__all__ = ["PAIRS", "Slot", "chunk_places", "inner_nodes", "slots"]

Slot = tuple[Any, Any, Path]
"""A container of the JSON, the key or index of a node in it, and the node's place in the state."""

PAIRS = ("map", "odict", "counter")
"""Tags whose content is an array of key and node."""


def slots(node: object, path: Path) -> list[Slot]:
    """Where the nodes stand that a container holds, in writing order. What is one thing to the user, such as a random
    generator, holds none here."""
    tag, content = tag_of(node)
    if tag == "d":
        return [(content, name, path.child(name)) for name in content]
    if tag in ("list", "tuple"):
        return [(content, index, path.child(index)) for index in range(len(content))]
    if tag in PAIRS:
        return _pairs(content, path)
    if tag == "ddict":
        return _pairs(content["items"], path)
    if tag == "statedict":
        return [*_pairs(content["items"], path), (content, "metadata", path.inner())]
    if tag == "deque":
        return [(content["items"], index, path.child(index)) for index in range(len(content["items"]))]
    if tag in ("named", "data"):
        return [(field, 1, path.child(field[0])) for field in content["fields"]]
    if tag != "object":
        return []
    if "optimizer" not in content:
        return [(content, "state", path.inner())]
    optimizer, below = content["optimizer"], path.child("state")
    states = [(pair, 1, below.child(_name_of(optimizer["names"], pair[0]))) for pair in optimizer["state"]]
    return [(optimizer, "groups", path.child("param_groups")), *states, (optimizer, "rest", path.inner())]


def _name_of(names: Sequence[str | None], position: object) -> object:
    known = names[position] if type(position) is int and 0 <= position < len(names) else None
    return known or position


def _pairs(pairs: list[Any], path: Path) -> list[Slot]:
    return [(pair, 1, path.child(pair[0] if type(pair[0]) in SCALARS else str(pair[0]))) for pair in pairs]


def chunk_places(node: object) -> Iterator[dict[str, Any]]:
    """The objects of the JSON, at and below a node, that name a chunk."""
    stack = [node]
    while stack:
        one = stack.pop()
        if type(one) in SCALARS:
            continue
        tag, content = tag_of(one)
        if tag in ("t", "blob", "ndarray") or (tag == "file" and content["chunk"] is not None):
            yield content
        elif tag == "folder":
            stack.extend(inner for _, inner in reversed(content["entries"]))
        elif tag == "compound":
            stack.extend(inner for _, inner in reversed(content["parts"]))
            if "context" in content:
                stack.append(content["context"])
        elif tag == "rng":
            stack.append(content["state"])
        else:
            stack.extend(container[key] for container, key, _ in reversed(slots(one, ROOT)))


def inner_nodes(node: object) -> list[object]:
    """All nodes that a node holds, in writing order."""
    tag, content = tag_of(node)
    if tag == "compound":
        context = [content["context"]] if "context" in content else []
        return [*context, *(inner for _, inner in content["parts"])]
    if tag == "rng":
        return [content["state"]]
    if tag == "enum":
        return [content["value"]]
    return [container[key] for container, key, _ in slots(node, ROOT)]
