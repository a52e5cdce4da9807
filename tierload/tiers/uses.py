"""When a pass through a model first uses each of its tensors, whoever found that out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["FirstUse", "ModuleCall", "Recorder", "tensor_names"]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module that itself, not only by modules within it, uses tensors of the model.

    ``module`` is its name, empty for the model; ``position`` counts the kernels that run before the call begins;
    ``consumes`` are names of parameters and buffers, in order.
    """

    module: str
    position: int
    consumes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FirstUse:
    """The order in which one forward pass uses parameters and buffers.

    ``source`` names the function that found it, without its ``of_``. ``positions`` has for each name, tied ones under
    each of theirs, how many kernels run before the first that uses it; what nothing uses is absent. ``kernels`` is how
    many a pass runs, ``calls`` what the calls of modules use, in the order in which they begin (empty where the source
    knows of none). ``missed`` says of each better source why it did not serve.
    """

    source: str
    positions: Mapping[str, int]
    kernels: int
    calls: tuple[ModuleCall, ...] = ()
    missed: Mapping[str, str] = field(default_factory=dict)


class Recorder:
    """Counts the kernels of one pass, and notes which of them is the first to use each tensor.

    ``ties`` has for each name all names of that tensor.
    """

    def __init__(self, ties: Mapping[str, tuple[str, ...]]) -> None:
        self._ties = ties
        self._positions: dict[str, int] = {}
        self._calls: dict[Hashable, tuple[str, int, dict[str, None]]] = {}
        self._kernels = 0

    def call(self, key: Hashable, module: str) -> None:
        """The call ``key`` of a module begins, unless it already has."""
        self._calls.setdefault(key, (module, self._kernels, {}))

    def kernel(self, key: Hashable, names: Iterable[str]) -> None:
        """A kernel runs in the call ``key``, and uses these tensors."""
        consumes = self._calls[key][2]
        for name in names:
            consumes.setdefault(name)
            for tied in self._ties[name]:
                self._positions.setdefault(tied, self._kernels)
        self._kernels += 1

    def result(self, source: str) -> FirstUse:
        """What was recorded."""
        calls = (ModuleCall(module, at, tuple(consumes)) for module, at, consumes in self._calls.values() if consumes)
        return FirstUse(source, self._positions, self._kernels, tuple(calls))


def tensor_names(model: torch.nn.Module) -> dict[torch.Tensor, tuple[str, ...]]:
    """The parameters and buffers of a model, each with all of its names, in the order of registration."""
    names: dict[torch.Tensor, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    names.setdefault(tensor, []).append(f"{module_name}.{name}" if module_name else name)
    return {tensor: tuple(found) for tensor, found in names.items()}
