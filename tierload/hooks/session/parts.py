"""What a run consists of: which parts can be filled in place, and what else has to be done for them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tierload.engine import guard, guarded
from tierload.errors import InvalidRequest
from tierload.hooks.session.loaders import Batches
from tierload.state import RNG, File, Folder, is_stateful, rng

__all__ = ["OWN", "first_trained", "guard_optimizers", "state_of", "trained"]

OWN = "session"
"""What a session knows of itself stands under this name; random states under ``rng``."""


def state_of(parts: Mapping[str, object]) -> tuple[dict[str, Any], list[Batches]]:
    """The state that is saved and loaded into, but for the session's own entry; and the batches of the loaders in it.

    Raises:
        InvalidRequest: A part has a reserved name, cannot be filled in place, or is a loader that does not say where it
            is.
    """
    state: dict[str, Any] = {}
    for name, part in parts.items():
        if name in ("rng", OWN):
            raise InvalidRequest(f"{name}= is the session's own (random states and its step are saved in any case)")
        if isinstance(part, DataLoader):
            state[name] = Batches(name, part)
            continue
        state[name] = part
        if not _is_fillable(part):
            raise InvalidRequest(
                f"{name}= is a {type(part).__qualname__}, which a resumed run could not set. Keep such values in a "
                f"dict that is a part ({name}={{...}}), or log them: run.log({name}=...)"
            )
        if any(isinstance(inner, DataLoader) for inner in _inside(part)):
            raise InvalidRequest(f"{name}= holds a loader; pass it as a part of its own, so that it resumes in order")
    state["rng"] = RNG()
    return state, [part for part in state.values() if isinstance(part, Batches)]


def guard_optimizers(state: Mapping[str, object]) -> None:
    """Guards every optimizer that the program has not guarded itself."""
    for part in _inside(state):
        if isinstance(part, torch.optim.Optimizer) and not guarded(part):
            guard(part)


def trained(state: Mapping[str, object]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The optimizer of a run, and the module that it trains.

    Raises:
        InvalidRequest: There is not one of each.
    """
    modules, optimizers = _trained(state)
    if len(optimizers) != 1 or len(modules) != 1:
        raise InvalidRequest(
            f"heat=True is for one optimizer and the module that it trains, and the parts have {len(optimizers)} and "
            f"{len(modules)} of them; make the meter that you mean: heat=tierload.heat.HeatMeter(model, optimizer)"
        )
    return modules[0], optimizers[0]


def first_trained(state: Mapping[str, object]) -> torch.nn.Module | None:
    """The first module that an optimizer trains, which a step is about to use; None where there is none."""
    return next(iter(_trained(state)[0]), None)


def _trained(state: Mapping[str, object]) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    parts = list(_inside(state))
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    held = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
    modules = [part for part in parts if isinstance(part, torch.nn.Module) and not held.isdisjoint(part.parameters())]
    return modules, optimizers


def _is_fillable(part: object) -> bool:
    containers = (dict, list, collections.deque, np.ndarray, torch.Tensor, File, Folder)
    fields: Any = getattr(type(part), "__dataclass_params__", None)
    mutable = fields is not None and not fields.frozen
    return isinstance(part, containers) or mutable or rng.kind_of(part) is not None or is_stateful(part)


def _inside(part: object) -> Iterator[object]:
    """A part, and what is in it where it is a container or a dataclass."""
    yield part
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        part = [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, (list, tuple, collections.deque)):
        for inner in part:
            yield from _inside(inner)
