"""The order of first use by one pass of the stand-in: what a step does, with shapes in place of numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tierload.tiers.stand_in import stand_in
from tierload.tiers.uses import FirstUse, Recorder, tensor_names

__all__ = ["computes", "of_step"]


def of_step(model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> FirstUse:
    """The order of one forward pass, as hooks on modules and the dispatcher see it. Nothing is computed and the model
    stays as it is, whatever device it is on.

    Raises:
        RuntimeError: The pass depends on values (a branch on them, or a shape), or torch cannot fake it.
        TypeError: The model cannot be copied, or does not take these arguments.
    """
    with stand_in(model, args, kwargs or {}) as copied:
        watch = _Watch(copied.model)
        with torch.no_grad(), copied.mode, watch:
            copied.model(*copied.args, **copied.kwargs)
    return watch.recorder.result("step")


@functools.cache
def computes(op: object) -> bool:
    """Whether a kernel runs for an operator, which only looks at its argument in another way, or asks it for something
    that is no tensor, otherwise."""
    if not isinstance(op, torch._ops.OpOverload):
        return True
    returns = op._schema.returns
    if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
        return False
    tensors = not returns or any("Tensor" in str(one.type) for one in returns)
    return tensors and op is not torch.ops.aten._unsafe_view.default


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own has no types
    """Sees each operator of a pass, and in which call of a module it runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = tensor_names(model)
        self.recorder = Recorder({name: names for names in tensors.values() for name in names})
        self._tensors = tensors  # keeps the storages, whose addresses are known by name
        self._names = {tensor.untyped_storage()._cdata: names[0] for tensor, names in tensors.items()}
        self.recorder.call(-1, "")  # for what runs outside of all calls: of a model that has a __call__ of its own
        self._stack = [-1]
        self._count = 0
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: self._enter(name))
            module.register_forward_hook(lambda module, args, output: self._leave(), always_call=True)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if computes(func):
            used = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            storages = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in used)
            self.recorder.kernel(self._stack[-1], (self._names[key] for key in storages if key in self._names))
        return func(*args, **kwargs)

    def _enter(self, name: str) -> None:
        self._stack.append(self._count)
        self.recorder.call(self._count, name)
        self._count += 1

    def _leave(self) -> None:
        self._stack.pop()
