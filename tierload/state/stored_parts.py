"""Where in a stored state a model and its optimizer are, when nobody says."""

from __future__ import annotations

from typing import Any

import torch

from tierload.errors import KeyMismatch
from tierload.state.keys import ROOT, Path
from tierload.state.members import entries
from tierload.state.nodes import SCALARS, tag_of
from tierload.state.reader import Reader
from tierload.state.wrappers import BareNames

__all__ = ["Part", "find_parts"]

Part = tuple[object, object, Path]
"""A live object, and the node and the place of what is stored for it."""

_MAPPINGS = ("d", "map", "odict", "statedict")
_LEVELS = 3  # of containers around a model
_USUAL = "model"  # where it is as a rule, and of several places the one that is meant


def find_parts(
    reader: Reader, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, key: str | None
) -> tuple[object, list[Part]]:
    """What is stored for a model, at ``key`` or where most of its names are (of several such places, at "model"), and
    for its optimizer; and the two in containers like those around them in the store.

    Raises:
        KeyMismatch: There is none, or more than one.
    """
    names = set(BareNames(model).state_dict())
    places = _places(reader)
    usual = next((place for place, _ in places if place.text() == _USUAL), None)
    if key is None and usual is not None and _names(reader, dict(places)[usual], usual) == names:
        found = [usual]
    elif key is None:
        alike = {
            place: len(names & _names(reader, node, place))
            for place, node in places
            if not _is_optimizer(reader, node, place)
        }
        most = max(alike.values(), default=0)
        found = [place for place, count in alike.items() if count == most and most]
        found = [place for place in found if place is usual] or found
    else:
        found = [place for place, _ in places if place.text() == key]
    if len(found) != 1:
        raise KeyMismatch(_refusal(model, key, [place.text() for place in found], places))
    nodes = dict(places)
    parts: list[Part] = [(model, nodes[found[0]], found[0])]
    if optimizer is not None:
        parts.append((optimizer, *_optimizer_part(reader, places)))
    into: Any = {}
    for live, _, place in parts:
        if place.is_root():
            return live, parts
        _put(into, place, live)
    return into, parts


def _places(reader: Reader) -> list[tuple[Path, object]]:
    """The containers and objects of the state's uppermost levels."""
    found: list[tuple[Path, object]] = []
    level = [(ROOT, reader.root)]
    for _ in range(_LEVELS):
        below: list[tuple[Path, object]] = []
        for place, node in level:
            if type(node) in SCALARS:
                continue
            tag, content = tag_of(node)
            if tag == "ref":
                node = reader.target(content)
                tag, content = tag_of(node)
            if tag in (*_MAPPINGS, "object", "data", "named", "list", "tuple"):
                found.append((place, node))
            if tag != "object":
                below += [(inner, child) for _, inner, child in entries(reader, tag, content, place)]
        level = below
    return found


def _names(reader: Reader, node: object, place: Path) -> set[Any]:
    tag, content = tag_of(node)
    if tag == "object" and "state" in content:
        tag, content = tag_of(content["state"])
    return {name for name, _, _ in entries(reader, tag, content, place)} if tag in _MAPPINGS else set()


def _is_optimizer(reader: Reader, node: object, place: Path) -> bool:
    """Whether a node is an optimizer, or looks like the state dict of one."""
    tag, content = tag_of(node)
    if tag == "object" and "optimizer" in content:
        return True
    names = [name for name in _names(reader, node, place) if type(name) is str]
    flattened = all(name.startswith(("state.", "param_groups.")) for name in names)
    return {"state", "param_groups"} <= set(names) or (len(names) > 0 and flattened)


def _optimizer_part(reader: Reader, places: list[tuple[Path, object]]) -> tuple[object, Path]:
    found = [(node, place) for place, node in places if _is_optimizer(reader, node, place)]
    if len(found) != 1:
        where = ", ".join(repr(place.text()) for _, place in found) or "nowhere"
        raise KeyMismatch(
            f"what is stored for the optimizer cannot be told: optimizers are {where}. "
            "load(into=...) takes the places of both from its target"
        )
    return found[0]


def _put(into: dict[Any, Any], place: Path, live: object) -> None:
    line: list[Any] = []
    at: Path | None = place
    while at is not None and not at.is_root():
        line.append(at.element)
        at = at.parent
    for element in reversed(line[1:]):
        into = into.setdefault(element, {})
    into[line[0]] = live


def _refusal(model: torch.nn.Module, key: str | None, found: list[str], places: list[tuple[Path, object]]) -> str:
    name = type(model).__qualname__
    if key is not None:
        listed = ", ".join(repr(place.text()) for place, _ in places[:20])
        return f"nothing is stored at {key!r} that a {name} could take; there are {listed}"
    if len(found) > 1:
        return f"a {name} is stored more than once: at {', '.join(map(repr, found))}. Say which with key="
    return f"nothing in the store has the names of this {name}'s state; key= says where it is"
