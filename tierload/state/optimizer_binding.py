"""Loading into optimizers, by the names of their parameters.

torch's own ``load_state_dict`` matches by position and casts every state to its parameter's dtype, which swaps moments
when parameters are reordered and destroys 8-bit states. So states are set as they were saved, unless the optimizer has
a ``load_state_dict`` of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tierload.state.cut_states import refuse_of_another_cut
from tierload.state.keys import Path
from tierload.state.leaf_binding import bind_stateful
from tierload.state.live_parameters import LiveParameters
from tierload.state.members import OptimizerNode
from tierload.state.optimizer_dicts import stored_optimizer
from tierload.state.optimizer_states import State, bind_state, home_of
from tierload.state.optimizers import parameters_of
from tierload.state.wrappers import ADVICE, has_wrapper_element

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["bind_optimizer"]

_UNNAMED = (
    "Optimizer states are matched by parameter name: put the module beside its optimizer when saving and in the target "
    "(into={'model': model, 'optimizer': optimizer}), or make the optimizer from named_parameters(). strict=False "
    "matches nameless parameters by position."
)


@dataclass(slots=True)
class _Match:
    """Saved parameters and live ones, by position, and the saved group of each live group."""

    saved: OptimizerNode
    groups: list[dict[str, Any]]
    live_of: dict[int, int] = field(default_factory=dict)
    group_of: dict[int, int] = field(default_factory=dict)


def bind_optimizer(binder: Binder, live: torch.optim.Optimizer, node: object, path: Path) -> None:
    """Bind an optimizer and what is stored for it: an optimizer, or a state dict that the user took himself."""
    saved = stored_optimizer(binder.reader, node, path)
    if saved is None and type(live).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        bind_stateful(binder, live, node, path)  # a form of its own, which it will know
        return
    if saved is None:
        binder.mismatch("an optimizer", node, path)
        return
    groups = binder.reader.unfiltered(*saved.groups)
    if not _is_groups(groups, len(saved.names)):
        binder.problems.dtypes(path, "has param groups of an unknown form in the store")
        return
    # All of them: it counts which patterns are used. The state of a parameter is loaded as one thing.
    wanted = [binder.wants_any(node, place) for _, node, place in saved.states]
    if not binder.reader.wants(saved.groups[1]) and not any(wanted):
        return
    for place in saved.strangers:
        binder.problems.unexpected(place, "is of a parameter that no stored group has")
    match = _Match(saved, groups)
    parameters = parameters_of(live)
    _match_parameters(binder, live, match, path)
    moved = any(position != at for position, at in match.live_of.items())
    if moved and saved.states and isinstance(live, torch.optim.LBFGS):
        binder.problems.unexpected(path, "is a history over all parameters in their order, which the target has not")
        return
    _match_groups(binder, live, match, path)
    states = _bind_states(binder, live, match, parameters)
    binder.reader.unfiltered(*saved.rest)  # checks it, and makes the memory that it needs
    binder.actions.append(lambda: _apply(binder, live, match, parameters, states, path))


def _is_groups(groups: object, count: int) -> bool:
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    lists = [group.get("params") for group in groups]
    if not all(isinstance(positions, list) for positions in lists):
        return False
    every = [position for positions in lists for position in positions]
    return all(type(position) is int and 0 <= position < count for position in every) and len(set(every)) == count


def _match_parameters(binder: Binder, live: torch.optim.Optimizer, match: _Match, path: Path) -> None:
    """Find the live parameter of every saved one, by its key, then by the optimizers' own names."""
    inner = {
        position: name
        for group in match.groups
        for position, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    names = match.saved.names
    saved = {name for name in (*names, *inner.values()) if name is not None}
    found = LiveParameters(binder.names, live, saved)
    matched: set[int] = set()
    for position, name in enumerate(names):
        at = found.find(name)
        if at is None:
            at = found.find(inner.get(position))
        if at is not None and at not in matched:
            match.live_of[position] = at
            matched.add(at)
    if found.without_wrappers:
        binder.reader.note(
            f"{path.shown()}: {found.without_wrappers} names of the store are read without the elements of wrappers"
        )
    count = len(parameters_of(live))
    if names and not match.live_of and (not any(names) or not found.named):
        binder.problems.unexpected(path, "has states that can only be matched by position")
        binder.problems.advise(_UNNAMED)
        if not binder.strict and len(names) == count:
            match.live_of = {position: position for position in range(len(names))}
        return
    states = path.child("state")
    for position, name in enumerate(names):
        if position not in match.live_of:
            binder.problems.unexpected(
                states.child(name or position), "is of a parameter that the target does not have"
            )
            if has_wrapper_element(name or ""):
                binder.problems.advise(ADVICE)
    for position in range(count):
        if position not in matched:
            binder.problems.missing(
                states.child(found.label(position)), "is of a parameter that the stored optimizer does not have"
            )


def _match_groups(binder: Binder, live: torch.optim.Optimizer, match: _Match, path: Path) -> None:
    """Find the saved group whose hyperparameters each live group takes: that of its parameters."""
    if not binder.reader.wants(match.saved.groups[1]):
        return
    saved_at = {found: position for position, found in match.live_of.items()}
    group_at = {position: number for number, group in enumerate(match.groups) for position in group["params"]}
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(live))}
    for number, group in enumerate(live.param_groups):
        positions = [numbers[id(parameter)] for parameter in group["params"]]
        sources = sorted({group_at[saved_at[position]] for position in positions if position in saved_at})
        if not positions and len(match.groups) == len(live.param_groups):
            sources = [number]
        if not sources:
            continue
        match.group_of[number] = sources[0]
        first = _hyper(match.groups[sources[0]])
        if any(not _equal(first, _hyper(match.groups[source])) for source in sources[1:]):
            binder.problems.unexpected(
                path.child("param_groups").child(number),
                f"has parameters of the stored groups {sources}, whose hyperparameters differ",
            )


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    plain = [not isinstance(value, torch.Tensor) for value in (*first.values(), *second.values())]
    return all(plain) and first == second


def _bind_states(
    binder: Binder, live: torch.optim.Optimizer, match: _Match, parameters: list[torch.Tensor]
) -> dict[Any, State | tuple[object, Path]]:
    """What becomes of the saved states, by live position or by the key that torch itself uses."""
    bound: dict[Any, State | tuple[object, Path]] = {}
    _, group_at = _new_groups(live, match, match.groups)
    for key, node, place in match.saved.states:
        if not binder.wants_any(node, place):
            continue
        if type(key) is int and 0 <= key < len(match.saved.names):
            if key not in match.live_of:
                continue
            position, key = key, match.live_of[key]
            if not _fits(binder, parameters[key], match.saved.names[position], node, place):
                del match.live_of[position]  # it keeps the state that it has
                continue
            parameter = parameters[key]
            parts = bind_state(binder, parameter, group_at[id(parameter)], live.state.get(parameter, {}), node, place)
            if parts is not None:
                bound[key] = parts
                continue
        binder.reader.unfiltered(node, place)
        binder.loaded.append(place)
        bound[key] = (node, place)
    return bound


def _fits(binder: Binder, parameter: torch.Tensor, name: str | None, node: object, place: Path) -> bool:
    """Whether a stored state is of a parameter like the live one: its own shapes do not tell."""
    shape = binder.shapes.of([name] if name else [])
    if shape is None:
        shape = binder.shapes.of(binder.names.of(parameter))
    if shape is not None and shape != tuple(parameter.shape):
        binder.problems.shapes(
            place, f"is of a parameter of shape {tuple(parameter.shape)} in the target and {shape} in the store"
        )
        return False
    return not refuse_of_another_cut(binder, parameter, name, node, place)


def _apply(
    binder: Binder,
    live: torch.optim.Optimizer,
    match: _Match,
    parameters: list[torch.Tensor],
    states: dict[Any, State | tuple[object, Path]],
    path: Path,
) -> None:
    """Give the optimizer exactly the states and hyperparameters that are stored."""
    reader = binder.reader
    groups, group_at = _new_groups(live, match, reader.unfiltered(*match.saved.groups))
    positions = {id(parameter): number for number, parameter in enumerate(parameters)}
    matched = set(match.live_of.values())
    state: dict[Any, Any] = {}
    for key, old in live.state.items():
        number = positions.get(id(key)) if isinstance(key, torch.Tensor) else None
        # What is loaded has exactly the stored states; what this load leaves out keeps its own.
        if number is not None and (reader.keys is not None or number not in matched):
            state[number] = old
    for key, parts in states.items():
        if isinstance(parts, tuple):
            state[key] = reader.unfiltered(*parts)
            continue
        parameter, own = parameters[key], {}
        for name, place, node, target in parts:
            value = reader.unfiltered(node, place) if target is None else target
            if isinstance(value, torch.Tensor) and target is None:
                value = value.to(home_of(name, parameter, group_at[id(parameter)]))  # never to another dtype
            own[name] = value
        state[key] = own
    _set(live, state, groups, positions, reader.unfiltered(*match.saved.rest))
    binder.loaded.append(path)


def _new_groups(
    live: torch.optim.Optimizer, match: _Match, saved: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """The groups with the hyperparameters of the saved ones; and each parameter's, by its identity."""
    groups: list[dict[str, Any]] = []
    group_at: dict[int, dict[str, Any]] = {}
    for at, group in enumerate(live.param_groups):
        source = match.group_of.get(at)
        hyper = _hyper(group) if source is None else _hyper(saved[source])
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        groups.append({"params": group["params"], **names, **hyper})
        group_at |= {id(parameter): groups[-1] for parameter in group["params"]}
    return groups, group_at


def _set(
    live: torch.optim.Optimizer,
    state: dict[Any, Any],
    groups: list[dict[str, Any]],
    positions: dict[int, int],
    rest: dict[str, Any],
) -> None:
    """Set states and groups by torch's protocol: hooks before and after, ``__setstate__`` between them."""
    packed: Any = {
        **rest,
        "state": state,
        "param_groups": [{**group, "params": [positions[id(one)] for one in group["params"]]} for group in groups],
    }
    if type(live).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        live.load_state_dict(packed)
        return
    for before in live._optimizer_load_state_dict_pre_hooks.values():
        changed = before(live, packed)
        packed = packed if changed is None else changed
    parameters = parameters_of(live)
    by_parameter: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in packed["state"].items():
        by_parameter[parameters[key] if type(key) is int and 0 <= key < len(parameters) else key] = value
    final = [
        {**packed_group, "params": group["params"]}
        for packed_group, group in zip(packed["param_groups"], groups, strict=True)
    ]
    live.__setstate__({"state": by_parameter, "param_groups": final})
    for after in live._optimizer_load_state_dict_post_hooks.values():
        after(live)
