"""Modules and everything else with ``state_dict()``: how they are written."""

from __future__ import annotations

from typing import Any

from tierload.state.containers import Parts
from tierload.state.keys import Path
from tierload.state.registry import type_name
from tierload.state.texts import quoted

__all__ = ["encode", "is_stateful"]


def is_stateful(value: object) -> bool:
    """Whether ``value`` gives and takes its state by ``state_dict`` and ``load_state_dict``."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def encode(value: Any, path: Path) -> Parts:
    """The parts of an object: its type's name, which is never imported, and what its ``state_dict()`` gives."""
    return [f'{{"object":{{"type":{quoted(type_name(type(value)))},"state":', (value.state_dict(), path.inner()), "}}"]
