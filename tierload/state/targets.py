"""What a live object, the target of a load, holds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tierload.state import files, rng
from tierload.state.containers import key_element
from tierload.state.keys import ROOT, Path
from tierload.state.modules import is_stateful
from tierload.state.registry import is_named_tuple
from tierload.state.wrappers import BareNames

__all__ = [
    "Put",
    "attribute_put",
    "fields_of_target",
    "is_filled",
    "is_mutable",
    "is_sequence",
    "item_put",
    "leaves_of_target",
    "refill",
]

Put = Callable[[Any], None]
"""Puts a new value where a live one stands in its container."""


def item_put(container: Any, key: Any) -> Put:
    """Replace an element of a dict, list or deque."""
    return lambda value: container.__setitem__(key, value)


def attribute_put(holder: Any, name: str) -> Put:
    """Replace an attribute."""
    return lambda value: setattr(holder, name, value)


def is_sequence(value: object) -> bool:
    """Whether ``value`` is a list, tuple or deque of values."""
    return isinstance(value, (list, tuple, collections.deque)) and type(value) is not torch.Size


def refill(live: collections.deque[Any], values: collections.deque[Any]) -> None:
    """Replace all elements of a deque."""
    live.clear()
    live.extend(values)


def is_mutable(value: Any) -> bool:
    """Whether the fields of a dataclass can be set."""
    return not value.__dataclass_params__.frozen


def fields_of_target(value: Any) -> list[tuple[str, Any]]:
    """Names and values of the fields of a dataclass."""
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _below(value: Any, path: Path) -> list[tuple[Any, Path]]:
    """What a live container holds; nothing for anything that is bound as one thing."""
    if isinstance(value, torch.nn.Module):
        return [(None, path.child(name)) for name in BareNames(value).state_dict()]
    if (
        rng.kind_of(value) is not None
        or isinstance(value, (torch.Tensor, files.File, files.Folder))
        or is_stateful(value)
    ):
        return []
    if isinstance(value, dict):
        return [(inner, path.child(key_element(key, path))) for key, inner in value.items()]
    if is_named_tuple(type(value)):
        return [(inner, path.child(name)) for name, inner in zip(value._fields, value, strict=True)]
    if is_sequence(value):
        return [(inner, path.child(index)) for index, inner in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(inner, path.child(name)) for name, inner in fields_of_target(value)]
    return []


def leaves_of_target(value: Any, path: Path) -> list[Path]:
    """The places of everything in the target at and below ``value`` that holds nothing else."""
    found: list[Path] = []
    seen: set[int] = set()
    stack = [(value, path)]
    while stack:
        inner, place = stack.pop()
        below = [] if id(inner) in seen else _below(inner, place)
        if below:
            seen.add(id(inner))
            stack.extend(below)
        else:
            found.append(place)
    return found


def is_filled(value: Any) -> bool:
    """Whether a container holds, at any depth, something that is filled rather than replaced."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, (torch.Tensor, files.File, files.Folder)) or rng.kind_of(inner) or is_stateful(inner):
            return True
        if id(inner) not in seen and (isinstance(inner, dict) or is_sequence(inner) or dataclasses.is_dataclass(inner)):
            seen.add(id(inner))
            stack.extend(below for below, _ in _below(inner, ROOT))
    return False
