"""A state as its leaves: what a format that is flat holds, and what two states are compared by."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tierload.errors import KeyMismatch
from tierload.state.containers import key_element
from tierload.state.keys import ROOT, Path, element_text, literal

__all__ = ["SelfReference", "array_tensor", "below", "children", "flat_name", "is_fields", "leaves"]


@dataclasses.dataclass(frozen=True)
class SelfReference:
    """Stands for a container that holds itself, where it is met again."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Leave:
    """A mark on the stack: everything in the container has been walked."""

    container: int


def is_fields(value: object) -> bool:
    """Whether ``value`` is a named tuple or a dataclass: a registered type that the store rebuilt."""
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return named or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def children(value: Any, path: Path) -> Iterable[tuple[object, object]] | None:
    """Element of the path and value of everything in a container; None for what is none."""
    if isinstance(value, Mapping):
        return [(key_element(key, path), inner) for key, inner in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple, collections.deque)) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if is_fields(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def leaves(state: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Place and value of all that holds nothing else, in order; empty containers are leaves too.

    What is in a container that stands in several places comes for each of them, or for the first only (``once``).
    """
    stack: list[tuple[object, Path]] = [(state, ROOT)]
    around: set[int] = set()
    done: set[int] = set()
    while stack:
        value, path = stack.pop()
        if isinstance(value, _Leave):
            around.discard(value.container)
            done.add(value.container)
            continue
        inner = children(value, path)
        if not inner:
            yield path, value
        elif id(value) in around:
            yield path, SelfReference()
        elif not once or id(value) not in done:
            around.add(id(value))
            stack.append((_Leave(id(value)), path))
            stack.extend(reversed([(each, path.child(element)) for element, each in inner]))


def flat_name(path: Path) -> str:
    """The name of a leaf in a flat format: its elements joined by ``/``, text as it stands, others as in its key."""
    elements: list[str] = []
    place: Path | None = path
    while place is not None and not place.is_root():
        element = place.element
        elements.append(element if isinstance(element, str) else f"#{literal(element) or repr(element)}")
        place = place.parent
    return "/".join(reversed(elements))


def below(state: object, key: str) -> object:
    """What stands at ``key`` in a state.

    Raises:
        KeyMismatch: Nothing does.
    """
    value = state
    for step in key.split("/"):
        inner = children(value, ROOT)
        found = [each for element, each in inner or () if element_text(element) == step]
        if not found:
            raise KeyMismatch(f"the state has no key {key!r}: `tierload show` lists the keys", missing=[key])
        value = found[0]
    return value


def array_tensor(value: object) -> torch.Tensor | None:
    """A NumPy array as a tensor of the same bytes; None for what has no such tensor."""
    if not isinstance(value, np.ndarray):
        return None
    try:
        return torch.from_numpy(value.copy())
    except (TypeError, ValueError):  # text, times, another byte order
        return None
