"""A state document cut into units, each of which is the same on all ranks of a job or not; and put together again.

A unit is a tensor, or a largest part without tensors (a scheduler's state, random generators). What is between the
units, the frame, has the keys of everything and no values, so frames that differ mean that the ranks' states do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierload.state.keys import ROOT, KeyFilter, Path
from tierload.state.nodes import SCALARS, tag_of
from tierload.state.references import References
from tierload.state.slots import PAIRS, Slot, chunk_places, slots
from tierload.types import FlatState

__all__ = ["Cut", "Unit", "cut", "matching"]


@dataclass(slots=True)
class Unit:
    """``node`` names its chunks by their position in ``chunks``, which are numbers in the rank's own flat state.
    ``is_values``: it holds no tensor. ``alone``: it was declared to be each rank's own, tensors or not."""

    key: str
    node: object
    chunks: list[int]
    is_values: bool
    alone: bool

    def text(self) -> str:
        """What it says, chunks aside."""
        return json.dumps(self.node, separators=(",", ":"))


@dataclass(slots=True)
class Cut:
    """A document: its ``frame``, which has ``{"unit": n}`` where ``units[n]`` belongs. A reference to a container is
    ``[n, k]`` in it: the k-th of a unit, or with n = -1 of the frame."""

    frame: object
    units: list[Unit]


def cut(flat: FlatState, per_rank: Sequence[str]) -> Cut:
    """Cut the document of a state. What matches a pattern of ``per_rank`` is one unit, tensors or not."""
    holder = [json.loads(flat.document)["root"]]
    own = KeyFilter(per_rank) if per_rank else None
    found: list[tuple[Slot, bool, bool]] = []
    stack: list[Slot] = [(holder, 0, ROOT)]
    with_tensors = _with_tensors(holder[0])
    while stack:
        slot = container, key, path = stack.pop()
        node = container[key]
        inner = [] if type(node) in SCALARS else slots(node, path)
        alone = own is not None and not path.is_root() and own.wants(path)
        if alone or not inner or (id(node) not in with_tensors and not (path.is_root() and _is_dict(node))):
            found.append((slot, type(node) in SCALARS or id(node) not in with_tensors, alone))
        else:
            stack.extend(reversed(inner))
    if b'"ref"' in flat.document:
        References(holder[0], [container[key] for (container, key, _), _, _ in found]).make_relative()
    units = []
    for number, ((container, key, path), is_values, alone) in enumerate(found):
        node = container[key]
        chunks = [_renumbered(place, at, None if alone else flat) for at, place in enumerate(chunk_places(node))]
        units.append(Unit(path.text(), node, chunks, is_values, alone))
        container[key] = {"unit": number}
    return Cut(holder[0], units)


def matching(whole: Cut, patterns: Sequence[str]) -> list[bool]:
    """Of each unit, whether its key matches one of the patterns, which are those of keys in a load."""
    wanted = KeyFilter(patterns) if patterns else None
    return [wanted is not None and wanted.wants(Path.of_text(unit.key)) for unit in whole.units]


def _is_dict(node: object) -> bool:
    return tag_of(node)[0] in ("d", *PAIRS)


def _renumbered(place: dict[str, Any], at: int, flat: FlatState | None) -> int:
    """Name a chunk by its position in the unit; a spread tensor is shown as the whole that it is."""
    number: int = place["chunk"]
    place["chunk"] = at
    if "tie" in place:
        place["tie"] = at  # ties are counted in a whole state, of which other ranks may have more
    whole = flat.sharded.get(number) if flat is not None else None
    if whole is not None:
        place["shape"] = list(whole.shape)
        place.pop("stride", None)
        place.pop("offset", None)
    return number


def _with_tensors(root: object) -> set[int]:
    """The nodes (by identity) that are tensors or hold some."""
    found: set[int] = set()
    stack: list[tuple[object, bool]] = [(root, False)]
    while stack:
        node, seen = stack.pop()
        if type(node) in SCALARS:
            continue
        below = [container[key] for container, key, _ in slots(node, ROOT)]
        if not seen:
            stack.append((node, True))
            stack.extend((inner, False) for inner in below)
        elif tag_of(node)[0] in ("t", "compound") or any(id(inner) in found for inner in below):
            found.add(id(node))
    return found
