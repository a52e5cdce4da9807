"""What the parameters of an optimizer are called: the key of each in the module that owns it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import torch

from tierload import _native
from tierload.state import modules
from tierload.state.containers import key_element
from tierload.state.keys import ROOT, Path
from tierload.state.registry import is_named_tuple
from tierload.state.wrappers import BareNames

__all__ = ["ParameterNames"]


class ParameterNames:
    """Keys of the parameters of all modules in a state, and of the tensors that stand in it by themselves.

    ``looked`` has modules, by their ids, whose state is known.
    """

    def __init__(self, state: object, looked: Mapping[int, _native.ModuleState] | None = None) -> None:
        self._looked = looked or {}
        self.keys = _native.TensorKeys()
        self._by_memory: dict[tuple[object, ...], list[str]] | None = None
        seen: set[int] = set()
        stack: list[tuple[object, Path]] = [(state, ROOT)]
        while stack:
            value, path = stack.pop()
            if isinstance(value, torch.Tensor):
                self.keys.add(value, path.text())
            elif isinstance(value, (str, bytes, int, float, torch.optim.Optimizer)) or id(value) in seen:
                continue
            elif isinstance(value, torch.nn.Module):
                self._add_module(value, path)
            else:
                seen.add(id(value))
                stack.extend((child, path.child(element)) for element, child in _children(value, path))

    def of(self, parameter: torch.Tensor) -> list[str]:
        """All keys of ``parameter`` in byte order; of tensors over the same elements when it is in no module."""
        return self.keys.of(parameter) or self._of_memory(parameter)

    def _add_module(self, module: torch.nn.Module, path: Path) -> None:
        state = self._looked.get(id(module)) or modules.known_state(module, path)
        if state is not None:
            self.keys.add_module(state, path.text())
            return
        named = list(module.named_parameters(remove_duplicate=False))
        bare = BareNames(module).unique([name for name, _ in named])
        for name, parameter in named:
            self.keys.add(parameter, path.child(bare[name]).text())

    def _of_memory(self, parameter: torch.Tensor) -> list[str]:
        if self._by_memory is None:
            self._by_memory = collections.defaultdict(list)
            for tensor, key in self.keys.all():
                if not tensor.is_meta and tensor.layout is torch.strided and tensor.numel():
                    self._by_memory[_memory(tensor)].append(key)
        return sorted(self._by_memory.get(_memory(parameter), []))


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
