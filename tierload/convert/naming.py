"""A nested state fitted to a flat format: names, ties, and what does not fit."""

from __future__ import annotations

from typing import Any

import torch

from tierload.convert import safetensors_file
from tierload.convert.bits import bytes_of
from tierload.convert.leaves import SelfReference, array_tensor, children, flat_name, leaves
from tierload.state.compounds import is_compound
from tierload.state.keys import ROOT, Path

__all__ = ["Fitted", "flat_state", "tally"]

_STRIDES = "its elements are in another order in memory: stored contiguous"


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are the same memory; one without elements, or of parts, is only itself."""
    if is_compound(tensor) or not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def tally(state: object) -> tuple[int, int, int, dict[str, str]]:
    """Of a nested state: distinct tensors, their bytes, other values, and further keys of tensors to their first."""
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    values = size = 0
    for path, value in leaves(state):
        if not isinstance(value, torch.Tensor):
            values += 1
        elif first.setdefault(_memory_of(value), path.text()) == path.text():
            size += bytes_of(value)
        else:
            ties[path.text()] = first[_memory_of(value)]
    return len(first), size, values, ties


class Fitted:
    """What a safetensors file will hold, and what of the state it cannot."""

    def __init__(self) -> None:
        self.flat = safetensors_file.Flat()
        self.changed: list[tuple[str, str]] = []
        self.left_out: list[tuple[str, str]] = []
        self._first: dict[tuple[Any, ...], str] = {}
        self._storages: dict[int, str] = {}

    def has(self, name: str) -> bool:
        """Whether a name is taken."""
        return name in self.flat.tensors or name in self.flat.ties or name in self.flat.values

    def add(self, path: Path, value: object) -> None:
        """One leaf: a tensor, a tie or a value, or left out with the reason."""
        name = flat_name(path)
        array = array_tensor(value)
        if array is not None:
            left_out = len(self.left_out)
            self.add(path, array)
            if len(self.left_out) == left_out:
                self.changed.append((path.text(), "was a NumPy array, is a tensor"))
        elif self.has(name):
            self.left_out.append((path.text(), f"another key has the same flat name {name!r}"))
        elif isinstance(value, torch.Tensor):
            self._add_tensor(path, name, value)
        elif isinstance(value, SelfReference):
            self.left_out.append((path.text(), "a container that holds itself"))
        else:
            refusal = safetensors_file.value_refusal(name, value)
            if refusal:
                self.left_out.append((path.text(), refusal))
            else:
                self.flat.values[name] = value

    def _add_tensor(self, path: Path, name: str, tensor: torch.Tensor) -> None:
        refusal = safetensors_file.refusal(name, tensor)
        if refusal:
            self.left_out.append((path.text(), refusal))
            return
        first = self._first.setdefault(_memory_of(tensor), name)
        if first != name:
            self.flat.ties[name] = first
            return
        self.flat.tensors[name] = tensor
        if tensor.numel():
            other = self._storages.setdefault(tensor.untyped_storage().data_ptr(), name)
            if other != name:
                self.changed.append((path.text(), f"is a view of the memory of {other!r}: stored by itself"))
        if not tensor.is_contiguous():
            self.changed.append((path.text(), _STRIDES))


def flat_state(state: Any) -> Fitted:
    """Fits a state to safetensors."""
    fitted = Fitted()
    for path, value in leaves(state):
        if not path.is_root() or children(value, path) is None:  # an empty state has no names
            fitted.add(path, value)
    fitted.flat.texts = safetensors_file.root_texts(state)
    for path, metadata in _module_versions(state):
        if path.is_root() and fitted.flat.texts:
            metadata = {name: value for name, value in metadata.items() if name != safetensors_file.TEXTS}
        refusal = safetensors_file.value_refusal("", metadata)
        if refusal:
            fitted.left_out.append((path.text(), f"its _metadata: {refusal}"))
        elif metadata:
            fitted.flat.modules[flat_name(path)] = metadata
    return fitted


def _module_versions(state: object) -> list[tuple[Path, Any]]:
    """Torch's ``_metadata`` of every state dict inside a state."""
    found: list[tuple[Path, Any]] = []
    stack: list[tuple[object, Path]] = [(state, ROOT)]
    seen: set[int] = set()
    while stack:
        value, path = stack.pop()
        if id(value) in seen:
            continue
        inner = children(value, path)
        if not inner:
            continue
        seen.add(id(value))
        metadata = getattr(value, "_metadata", None)
        if isinstance(metadata, dict):
            found.append((path, metadata))
        stack.extend((each, path.child(element)) for element, each in inner)
    return sorted(found, key=lambda pair: pair[0].text())
