"""Modules and everything else with ``state_dict()``: how they are written."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

import torch

from tierload import _native
from tierload.state.containers import Parts
from tierload.state.keys import DEPTH_MAX, Path
from tierload.state.registry import type_name
from tierload.state.tensors import TORCH
from tierload.state.texts import quoted
from tierload.state.wrappers import BareNames, bare_module, told, wrapper_of

__all__ = ["encode", "encode_module", "is_stateful", "known_state", "own_functions"]

_DEPTH = 4
"""Levels of nesting in what ``state_dict()`` of a module gives."""


def own_functions(cls: type, *names: str) -> dict[str, object]:
    """These functions of a class of torch, as torch wrote them; those that somebody has replaced are left out."""
    module = sys.modules[cls.__module__]
    found: dict[str, object] = {}
    for name in names:
        function = vars(cls).get(name)
        plain = inspect.unwrap(function) if callable(function) else None
        wrapped_by = {module.__name__, "torch._compile"}
        if (
            isinstance(function, FunctionType)
            and isinstance(plain, FunctionType)
            and function.__globals__.get("__name__") in wrapped_by
            and plain.__globals__ is vars(module)
            and plain.__code__.co_qualname == f"{cls.__qualname__}.{name}"
        ):
            found[name] = function
    return found


def _rules() -> _native.ModuleRules | None:
    """What is known of torch's modules, unless something replaced it before."""
    names = (
        "state_dict",
        "_save_to_state_dict",
        "get_extra_state",
        "named_parameters",
        "_named_members",
        "named_modules",
    )
    functions = own_functions(torch.nn.Module, *names)
    return _native.ModuleRules(TORCH, functions, wrapper_of) if len(functions) == len(names) else None


_RULES = _rules()


def known_state(module: object, path: Path) -> _native.ModuleState | None:
    """What ``state_dict()`` and ``named_parameters()`` of a module at ``path`` give, where that is known without
    calling them: where they are torch's own, from here to the last module inside, without hooks. Wrappers are seen
    through."""
    if _RULES is None or path.depth + _DEPTH > DEPTH_MAX or torch.overrides.has_torch_function((module,)):
        return None  # in a torch function mode, detach() may mean something else
    return _RULES.state_of(module)


def is_stateful(value: object) -> bool:
    """Whether ``value`` gives and takes its state by ``state_dict`` and ``load_state_dict``."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def encode(value: Any, path: Path) -> Parts:
    """The parts of an object: its type's name, which is never imported, and what its ``state_dict()`` gives."""
    return _parts(type(value), value.state_dict(), path)


def encode_module(module: torch.nn.Module, path: Path, known: _native.ModuleState | None, notes: list[str]) -> Parts:
    """The parts of a module, ``known`` or asked for: those of the module without wrappers, whichever it is in."""
    names = BareNames(module) if known is None else None
    wrappers = names.wrappers if names is not None else known.wrappers  # type: ignore[union-attr]
    if wrappers:
        notes.append(f"{path.shown()}: {told(wrappers)}")
    state = known if names is None else names.state_dict()
    return _parts(type(bare_module(module)), state, path)


def _parts(cls: type, state: object, path: Path) -> Parts:
    return [f'{{"object":{{"type":{quoted(type_name(cls))},"state":', (state, path.inner()), "}}"]
