"""Optimizers, stored by the names of their parameters, because positions change when code does."""

from __future__ import annotations

from typing import Any

import torch

from tierload import _native
from tierload.state import modules
from tierload.state.containers import Parts, hashable_json
from tierload.state.keys import Path
from tierload.state.modules import own_functions
from tierload.state.names import ParameterNames
from tierload.state.registry import type_name
from tierload.state.texts import quoted, text_json

__all__ = ["encode", "own_names", "parameters_of"]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters in the order of the positions that torch's ``state_dict()`` gives them."""
    every = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    return list(every.values())


def own_names(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Position → name, where the optimizer was made from named parameters and the name is only used once."""
    positions = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    users: dict[str, set[int]] = {}
    for group in optimizer.param_groups:
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False):
            users.setdefault(name, set()).add(positions[id(parameter)])
    return {next(iter(numbers)): name for name, numbers in users.items() if len(numbers) == 1}


_STATE_DICT = own_functions(torch.optim.Optimizer, "state_dict").get("state_dict")

_READ = ("param_groups", "state", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
"""Attributes that torch's ``state_dict()`` reads."""


def known_state(optimizer: torch.optim.Optimizer, names: ParameterNames) -> _native.OptimizerState | None:
    """What ``state_dict()`` gives, where that is known without calling it: where it is torch's own, without hooks, and
    each parameter has one name."""
    cls, own = type(optimizer), vars(optimizer)
    if (
        cls.state_dict is not _STATE_DICT
        or "state_dict" in own
        or cls.__getattribute__ is not object.__getattribute__
        or any(name not in own or hasattr(cls, name) for name in _READ)
        or any(own[name] for name in _READ[2:])
        or torch.overrides.has_torch_function((optimizer,))
    ):
        return None
    return _native.OptimizerState.of(own["param_groups"], own["state"], names.keys)


def encode(optimizer: torch.optim.Optimizer, path: Path, names: ParameterNames, notes: list[str]) -> Parts:
    """The parts of an optimizer; of an object that keeps positions when its ``state_dict()`` is not of torch's form."""
    known = known_state(optimizer, names)
    if known is not None:
        return _parts(optimizer, path, known.names, known.groups, [(known, path.child("state"))], {})
    parameters = parameters_of(optimizer)
    packed: Any = optimizer.state_dict()
    if not _is_usual(packed, len(parameters)):
        notes.append(f"{path.shown()}: its state_dict() has a form of its own and is stored as it is, by position")
        return modules.encode(optimizer, path)
    own = own_names(optimizer)
    labels: list[str | None] = []
    used: set[str | None] = set()
    for position, parameter in enumerate(parameters):
        label = next(iter(names.of(parameter)), own.get(position))
        labels.append(None if label in used else label)
        used.add(label)
    unnamed = labels.count(None)
    if unnamed:
        notes.append(
            f"{path.shown()}: {unnamed} of {len(labels)} parameters are in no module of this state and have no name; "
            "they are stored by position. Save the module beside its optimizer, or make the optimizer from "
            "named_parameters()"
        )
    texts = ",".join("null" if label is None else text_json(label) for label in labels)
    states = path.child("state")
    parts: Parts = []
    for number, (key, state) in enumerate(packed["state"].items()):
        label = labels[key] if type(key) is int and 0 <= key < len(labels) else None
        element = key if label is None else label
        parts += [f"{',' if number else ''}[{hashable_json(key, states)},", (state, states.child(element)), "]"]
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return _parts(optimizer, path, texts, packed["param_groups"], parts, rest)


def _parts(optimizer: object, path: Path, names: str, groups: object, states: Parts, rest: object) -> Parts:
    return [
        f'{{"object":{{"type":{quoted(type_name(type(optimizer)))},"optimizer":{{"names":[{names}],"groups":',
        (groups, path.child("param_groups")),
        ',"state":[',
        *states,
        '],"rest":',
        (rest, path.inner()),
        "}}}",
    ]


def _is_usual(packed: object, count: int) -> bool:
    """Whether a state dict is of torch's form, with positions for all ``count`` parameters."""
    if not isinstance(packed, dict):
        return False
    groups, states = packed.get("param_groups"), packed.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict):
        return False
    if not all(type(key) in (int, str) for key in states):
        return False
    positions: set[object] = set()
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return False
        positions.update(group["params"])
    return positions == set(range(count))
