"""Types that a load may rebuild: registered by the program or passed by the caller, never imported by name."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TypeVar

import torch

__all__ = ["is_named_tuple", "is_wrapper", "known_types", "register_type", "type_name"]

T = TypeVar("T", bound=type)

_REGISTERED: dict[str, type] = {}


def type_name(cls: type) -> str:
    """How the store names a type: ``module:qualname``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_named_tuple(cls: type) -> bool:
    """Whether ``cls`` is a named tuple."""
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and type(fields) is tuple and all(type(name) is str for name in fields)


def is_wrapper(cls: type) -> bool:
    """Whether ``cls`` is a tensor subclass that says what it is made of: torch's traceable wrapper subclasses."""
    names = ("__tensor_flatten__", "__tensor_unflatten__")
    return issubclass(cls, torch.Tensor) and all(callable(getattr(cls, name, None)) for name in names)


def register_type(cls: T) -> T:
    """Let every load in this process rebuild ``cls``: a dataclass, a named tuple, an Enum, or a tensor subclass with
    ``__tensor_flatten__`` and ``__tensor_unflatten__``. Usable as a decorator.

    Raises:
        TypeError: It is none of these.
    """
    if not isinstance(cls, type) or not (
        dataclasses.is_dataclass(cls) or is_named_tuple(cls) or issubclass(cls, enum.Enum) or is_wrapper(cls)
    ):
        raise TypeError(
            f"{cls!r} is not a dataclass, named tuple, Enum or traceable wrapper subclass; no others are rebuilt"
        )
    _REGISTERED[type_name(cls)] = cls
    return cls


def known_types(passed: Iterable[type]) -> dict[str, type]:
    """Types by their name: the registered ones, and before them those that the caller passed."""
    return _REGISTERED | {type_name(cls): cls for cls in passed}
