"""References between containers of a document that is cut into units (docs/FORMAT.md section 8).

In a whole document a ``ref`` is a number: containers are counted in writing order. Units come from several ranks, and
what stands before a container may hold more of them on one rank than on another; so between the two a ``ref`` is
``[unit, k]``: the k-th container of that unit, or with -1 of what is in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierload.errors import CorruptStore
from tierload.state.members import COUNTED
from tierload.state.nodes import SCALARS, tag_of
from tierload.state.slots import inner_nodes

__all__ = ["References"]

_FRAME = -1


class References:
    """The containers of a document and the references to them. ``units`` are nodes inside ``root``."""

    def __init__(self, root: object, units: Sequence[object]) -> None:
        self._places: list[tuple[int, int]] = []  # of the container with this number: its unit, and which one there
        self._refs: list[dict[str, Any]] = []
        unit_of = {id(node): number for number, node in enumerate(units) if type(node) not in SCALARS}
        counts: dict[int, int] = {}
        stack: list[tuple[object, int]] = [(root, _FRAME)]
        while stack:
            node, unit = stack.pop()
            if type(node) in SCALARS:
                continue
            unit = unit_of.get(id(node), unit)
            tag, _ = tag_of(node)
            if tag == "ref":
                assert isinstance(node, dict)
                self._refs.append(node)
            if tag in COUNTED:
                self._places.append((unit, counts.get(unit, 0)))
                counts[unit] = counts.get(unit, 0) + 1
            stack.extend((inner, unit) for inner in reversed(inner_nodes(node)))

    def make_relative(self) -> None:
        """Turn numbers into unit and position."""
        for node in self._refs:
            node["ref"] = list(self._places[node["ref"]])

    def make_absolute(self) -> None:
        """Turn unit and position into numbers.

        Raises:
            CorruptStore: There is no such container.
        """
        numbers = {place: number for number, place in enumerate(self._places)}
        for node in self._refs:
            place = node["ref"]
            number = numbers.get(tuple(place)) if type(place) is list else None
            if number is None:
                raise CorruptStore(f"the state document refers to container {place!r:.40}, which it does not have")
            node["ref"] = number
