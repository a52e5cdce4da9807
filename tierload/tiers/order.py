"""When the tensors of a model are first used, by the best source that there is; a hot start loads in this order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tierload.errors import InvalidRequest
from tierload.tiers.graphs import of_export, of_trace
from tierload.tiers.steps import of_step
from tierload.tiers.uses import FirstUse, Recorder, tensor_names
from tierload.types.heat import HeatTable

__all__ = ["first_uses", "of_heat", "of_modules"]

_REFUSALS = (RuntimeError, TypeError, ValueError, NameError, AssertionError)
"""What is raised of a model that cannot be followed. By torch's fakes and torch.export: kinds of RuntimeError (as
``torch._dynamo.exc``), or asserts; by copies: TypeError; by torch.fx: those, TraceError (a ValueError), and NameError;
by the model itself, what it says of arguments that are no tensors."""

_REASON_CHARACTERS = 200
_NO_EXAMPLE = "there is no example of its arguments"


def first_uses(
    model: torch.nn.Module,
    example: tuple[Any, ...] | Mapping[str, Any] | None = None,
    heat: HeatTable | None = None,
    prefix: str = "",
) -> FirstUse:
    """When a forward pass of ``model`` first uses each of its parameters and buffers.

    ``example`` are arguments of a call, by position or by name, of the right shapes; values do not matter. ``heat`` is
    what a commit recorded of the model, under keys that begin with ``prefix``. In the order in which they are tried:
    a step of the example, which is exact; the recorded heat, which alone knows where a router or an early exit goes; an
    export of the example, which takes several times as long as a step and also follows shapes that depend on values; a
    trace without arguments; and the order of registration.

    The model is not run: no kernel is, no memory is taken, and its modes, gradients, buffers, hooks and the random
    numbers stay as they are. Only its Python code runs, on a copy.

    Raises:
        InvalidRequest: The example is no tuple and no mapping, or ``forward`` does not take it.
    """
    args, kwargs = _arguments(model, example)
    sources: list[tuple[str, Callable[[], FirstUse] | str]] = [
        ("step", _NO_EXAMPLE if example is None else lambda: of_step(model, args, kwargs)),
        ("heat", "no heat was recorded" if heat is None else lambda: _of_model(model, of_heat(heat, prefix))),
        ("export", _NO_EXAMPLE if example is None else lambda: of_export(model, args, kwargs)),
        ("trace", lambda: of_trace(model)),
    ]
    missed: dict[str, str] = {}
    for name, source in sources:
        if isinstance(source, str):
            missed[name] = source
            continue
        try:
            found = source()
        except _REFUSALS as error:
            missed[name] = _reason(error)
            continue
        if found.positions or not tensor_names(model):
            return replace(found, missed=missed)
        missed[name] = "it finds no use of any tensor"  # forward is bound to another object than the copy
    return replace(of_modules(model), missed=missed)


def of_heat(table: HeatTable, prefix: str = "") -> FirstUse:
    """The order that a heat meter recorded in the last step before a commit, of the keys that begin with ``prefix``,
    without it. Each tensor counts as one kernel.

    Raises:
        InvalidRequest: No such key was used.
    """
    pairs = zip(table.keys, table.first_use.tolist(), strict=True)
    uses = {key.removeprefix(prefix): at for key, at in pairs if at >= 0 and key.startswith(prefix)}
    if not uses:
        raise InvalidRequest(f"the heat table has no first use of a key that begins with {prefix!r}")
    positions = dict(sorted(uses.items(), key=lambda use: use[1]))
    return FirstUse("heat", positions, max(positions.values()) + 1)


def of_modules(model: torch.nn.Module, names: Mapping[torch.Tensor, tuple[str, ...]] | None = None) -> FirstUse:
    """The order in which modules were registered, as if each used all of its own tensors in one kernel. ``names`` are
    those of ``tensor_names``, for whoever has them."""
    names_of = tensor_names(model) if names is None else names
    ties = {name: own for own in names_of.values() for name in own}
    recorder = Recorder(ties)
    for name, module in model.named_modules():
        own = [key for held in (module._parameters, module._buffers) for key, one in held.items() if one is not None]
        if own:
            recorder.call(name, name)
            recorder.kernel(name, [f"{name}.{key}" if name else key for key in own])
    return recorder.result("modules")


def _arguments(
    model: torch.nn.Module, example: tuple[Any, ...] | Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The example as arguments by position and by name."""
    if example is None:
        return (), {}
    if not isinstance(example, (tuple, Mapping)):
        raise InvalidRequest(
            f"the example is a {type(example).__name__}; give a tuple of arguments, or a mapping by name"
        )
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidRequest(f"forward of {type(model).__name__} does not take the example: {error}") from error
    return args, kwargs


def _of_model(model: torch.nn.Module, found: FirstUse) -> FirstUse:
    """What was recorded, for all that the model has: meters follow parameters, each under one name. Tied ones are used
    together, and buffers with the parameters of their module, or at once where it has none."""
    positions: dict[str, int] = {}
    for names in tensor_names(model).values():
        known = [found.positions[name] for name in names if name in found.positions]
        positions.update(dict.fromkeys(names, min(known)) if known else {})
    if not positions:
        raise InvalidRequest(f"none of the recorded uses, of {next(iter(found.positions))!r} first, is of this model")
    recorded = dict(positions)
    for name, module in model.named_modules(remove_duplicate=False):
        start = f"{name}." if name else ""
        own = [start + key for key, one in module._parameters.items() if one is not None]
        known = [recorded[key] for key in own if key in recorded]
        if known or not own:
            buffers = (start + key for key, one in module._buffers.items() if one is not None)
            positions.update((key, min(known, default=0)) for key in buffers)
    return replace(found, positions=positions)


def _reason(error: Exception) -> str:
    """The first line of an error, with its kind."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:_REASON_CHARACTERS]
