"""What the parameters of an optimizer are called: the key of each in the module that owns it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import torch

from tierload.state.containers import key_element
from tierload.state.keys import ROOT, Path
from tierload.state.registry import is_named_tuple

__all__ = ["ParameterNames"]


class ParameterNames:
    """Keys of the parameters of all modules in a state, and of the tensors that stand in it by themselves."""

    def __init__(self, state: object) -> None:
        self._by_object: dict[int, list[str]] = collections.defaultdict(list)
        self._by_memory: dict[tuple[object, ...], list[str]] = collections.defaultdict(list)
        self._kept: list[object] = []
        seen: set[int] = set()
        stack: list[tuple[object, Path]] = [(state, ROOT)]
        while stack:
            value, path = stack.pop()
            if isinstance(value, torch.Tensor):
                self._add(value, path)
            elif isinstance(value, (str, bytes, int, float, torch.optim.Optimizer)) or id(value) in seen:
                continue
            elif isinstance(value, torch.nn.Module):
                for name, parameter in value.named_parameters(remove_duplicate=False):
                    self._add(parameter, path.child(name))
            else:
                seen.add(id(value))
                stack.extend((child, path.child(element)) for element, child in _children(value, path))

    def of(self, parameter: torch.Tensor) -> list[str]:
        """All keys of ``parameter`` in byte order; of tensors over the same elements when it is in no module."""
        found = self._by_object.get(id(parameter)) or self._by_memory.get(_memory(parameter), [])
        return sorted(found)

    def _add(self, tensor: torch.Tensor, path: Path) -> None:
        self._kept.append(tensor)
        self._by_object[id(tensor)].append(path.text())
        if not tensor.is_meta and tensor.layout is torch.strided and tensor.numel():
            self._by_memory[_memory(tensor)].append(path.text())


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.is_meta or tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _children(value: object, path: Path) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return [(key_element(key, path), child) for key, child in value.items()]
    if is_named_tuple(type(value)):
        return zip(type(value)._fields, value, strict=True)  # type: ignore[attr-defined, call-overload, no-any-return]
    if isinstance(value, (list, tuple, collections.deque)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return ()
