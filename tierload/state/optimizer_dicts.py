"""What is stored for an optimizer, however it came there: as the optimizer, or as a state dict that the user took.

Such a dict has positions (torch's own ``state_dict()``) or names of parameters in their model, nested or flattened
(``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``). All become the same: names, groups, states.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tierload.state.keys import Path
from tierload.state.members import OptimizerNode, entries, optimizer_node
from tierload.state.nodes import tag_of

if TYPE_CHECKING:
    from tierload.state.reader import Reader

__all__ = ["stored_optimizer"]

_STATE, _GROUPS = "state", "param_groups"


class _Flat(Path):
    """A place in a flattened dict: what is below it stands beside it, under a longer key."""

    __slots__ = ()

    def child(self, element: object) -> Path:
        return _Flat(self.parent, f"{self.element}.{element}", self.depth)


def stored_optimizer(reader: Reader, node: object, path: Path) -> OptimizerNode | None:
    """The stored node as an optimizer; None when it is neither one nor the state dict of one."""
    tag, content = tag_of(node)
    if tag == "object" and "optimizer" in content:
        return optimizer_node(reader, content["optimizer"], path)
    if tag == "object":
        tag, content = tag_of(content["state"])
    parts = {key: (inner, place) for key, place, inner in entries(reader, tag, content, path)}
    if _STATE not in parts or _GROUPS not in parts:
        return _flattened(parts, path)
    groups = reader.unfiltered(*parts[_GROUPS])
    labels = _labels(groups)
    names: list[str | None] = [None] * len(labels)
    groups_node, groups_at = parts[_GROUPS]
    states_node, states_at = parts[_STATE]
    states = [(key, inner, place) for key, place, inner in entries(reader, *tag_of(states_node), states_at)]
    strangers: tuple[Path, ...] = ()
    if labels and all(type(label) is str for label in labels):
        names = list(labels)
        positions = {name: position for position, name in enumerate(labels)}
        strangers = tuple(place for key, _, place in states if key not in positions)
        states = [(positions[key], inner, place) for key, inner, place in states if key in positions]
        groups_node = _by_position(reader, groups_node, positions, groups_at)
    rest = {"d": {key: inner for key, (inner, _) in parts.items() if key not in (_STATE, _GROUPS)}}
    return OptimizerNode(names, (groups_node, groups_at), states, (rest, path), strangers)


def _labels(groups: object) -> list[Any]:
    """What the groups call their parameters; nothing where they are no groups."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    every = [group.get("params") for group in groups]
    return [label for labels in every for label in labels] if all(isinstance(labels, list) for labels in every) else []


def _by_position(reader: Reader, node: object, positions: dict[str, int], path: Path) -> object:
    """The node of groups, with positions in the place of names."""
    groups = []
    for _, place, group in entries(reader, *_opened(reader, node), path):
        members = {key: inner for key, _, inner in entries(reader, *_opened(reader, group), place)}
        members["params"] = [positions[reader.key(name)] for name in _opened(reader, members["params"])[1]]
        groups.append({"d": members})
    return groups


def _opened(reader: Reader, node: object) -> tuple[str, Any]:
    tag, content = tag_of(node)
    return tag_of(reader.target(content)) if tag == "ref" else (tag, content)


def _flattened(parts: dict[Any, tuple[object, Path]], path: Path) -> OptimizerNode | None:
    """The optimizer of ``state.<name>.exp_avg`` and ``param_groups.<name>.lr``, whose groups are parameters with equal
    hyperparameters."""
    prefixes = (f"{_STATE}.", f"{_GROUPS}.")
    if not all(type(key) is str and key.startswith(prefixes) for key in parts):
        return None
    hyper: dict[str, dict[str, object]] = {}
    for key, (node, _) in parts.items():
        if key.startswith(prefixes[1]):
            name, _, what = key[len(prefixes[1]) :].rpartition(".")
            hyper.setdefault(name, {})[what] = node
    if not hyper:
        return None
    positions = {name: position for position, name in enumerate(hyper)}
    alike: dict[str, dict[str, Any]] = {}
    for name, members in hyper.items():
        group = alike.setdefault(json.dumps(members, sort_keys=True), members | {"params": []})
        group["params"].append(positions[name])
    states: dict[str, dict[str, Any]] = {}
    for key, (node, _) in parts.items():
        if key.startswith(prefixes[0]):
            name, inner = _split(key[len(prefixes[0]) :], positions)
            if any(f"{_STATE}.{name}.{'.'.join(inner[:end])}" in parts for end in range(1, len(inner))):
                return None  # a value that has values inside
            holder = states.setdefault(name, {})
            for element in inner[:-1]:
                holder = holder.setdefault(element, {"d": {}})["d"]
            holder[inner[-1]] = node
    places = {name: _Flat(path, f"{_STATE}.{name}", path.depth + 1) for name in states}
    return OptimizerNode(
        list(positions),
        ([{"d": group} for group in alike.values()], path.child(_GROUPS)),
        [(positions[name], {"d": at}, places[name]) for name, at in states.items() if name in positions],
        ({"d": {}}, path),
        tuple(place for name, place in places.items() if name not in positions),
    )


def _split(key: str, names: dict[str, int]) -> tuple[str, list[str]]:
    """The parameter that a flattened key is of, and what of its state."""
    elements = key.split(".")
    for end in range(len(elements) - 1, 0, -1):
        name = ".".join(elements[:end])
        if name in names:
            return name, elements[end:]
    return ".".join(elements[:-1]), elements[-1:]
