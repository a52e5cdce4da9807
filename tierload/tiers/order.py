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

_REFUSALS = (RuntimeError, TypeError, ValueError, NameError)
"""What a model raises that cannot be followed: torch's fakes, torch.export and what both do with data-dependent code
are kinds of RuntimeError, copies raise TypeError, and traces by torch.fx those, ValueError (TraceError) and
NameError."""

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
        InvalidRequest: ``forward`` does not take the example.
    """
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example or (), {})
    if example is not None:
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidRequest(f"forward of {type(model).__name__} does not take the example: {error}") from error
    sources: list[tuple[str, Callable[[], FirstUse] | str]] = [
        ("step", _NO_EXAMPLE if example is None else lambda: of_step(model, args, kwargs)),
        ("heat", "no heat was recorded" if heat is None else lambda: _with_buffers(model, of_heat(heat, prefix))),
        ("export", _NO_EXAMPLE if example is None else lambda: of_export(model, args, kwargs)),
        ("trace", lambda: of_trace(model)),
    ]
    missed: dict[str, str] = {}
    for name, source in sources:
        if isinstance(source, str):
            missed[name] = source
            continue
        try:
            return replace(source(), missed=missed)
        except _REFUSALS as error:
            missed[name] = _reason(error)
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


def of_modules(model: torch.nn.Module) -> FirstUse:
    """The order in which modules were registered, as if each used all of its own tensors in one kernel."""
    ties = {name: names for names in tensor_names(model).values() for name in names}
    recorder = Recorder(ties)
    for name, module in model.named_modules():
        own = [key for held in (module._parameters, module._buffers) for key, one in held.items() if one is not None]
        if own:
            recorder.call(name, name)
            recorder.kernel(name, [f"{name}.{key}" if name else key for key in own])
    return recorder.result("modules")


def _with_buffers(model: torch.nn.Module, found: FirstUse) -> FirstUse:
    """Meters follow parameters; buffers are used with those of their module, and at once where it has none."""
    positions = dict(found.positions)
    for name, module in model.named_modules(remove_duplicate=False):
        start = f"{name}." if name else ""
        used = [found.positions.get(start + key) for key in module._parameters]
        known = [at for at in used if at is not None]
        if known or not used:
            for key in module._buffers:
                positions.setdefault(start + key, min(known, default=0))
    return replace(found, positions=positions)


def _reason(error: Exception) -> str:
    """The first line of an error, with its kind."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:_REASON_CHARACTERS]
