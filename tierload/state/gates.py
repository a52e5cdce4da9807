"""Tensors that are not there yet: the first use of one waits for it.

A gated tensor is the same object as ever, of a class whose every function waits; it becomes an ordinary one when it has
arrived. torch does the same to its lazily initialised parameters. What it does not see are uses that never ask Python:
a module that runs in TorchScript, and another tensor over the same memory that was made before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["Gate", "GatedParameter", "GatedTensor", "arrived"]

Wait = Callable[[], None]
"""Returns when the bytes are there; raises what is wrong with them."""

_GATE = "_tierload_gate"


class Gate:
    """Makes tensors wait. ``wait`` is called by their first use, by whatever thread; ``open`` lets them be."""

    def __init__(self, tensors: Iterable[torch.Tensor], wait: Wait) -> None:
        self.wait = wait
        self._tensors = tuple(tensors)
        for tensor in self._tensors:
            vars(tensor)[_GATE] = self
            tensor.__class__ = GatedParameter if type(tensor) is torch.nn.Parameter else GatedTensor

    def open(self) -> None:
        """They are there."""
        for tensor in self._tensors:
            if vars(tensor).pop(_GATE, None) is not None:
                tensor.__class__ = torch.nn.Parameter if type(tensor) is GatedParameter else torch.Tensor


class _Gated:
    @classmethod
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _FACTS:
            _wait_for(args)
            if kwargs:
                _wait_for(kwargs.values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for((self,))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for((self,))
        return self.__reduce_ex__(protocol)


class GatedParameter(_Gated, torch.nn.Parameter):
    """A parameter that is not there yet."""


class GatedTensor(_Gated, torch.Tensor):
    """A buffer, or another tensor, that is not there yet."""


def arrived(value: object) -> None:
    """Waits for a tensor that is not there yet; anything else is. What is in a container is not looked at."""
    if isinstance(value, _Gated):
        _wait_for((value,))


def _wait_for(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, _Gated):
            gate: Gate | None = vars(value).get(_GATE)
            if gate is not None:  # nobody has opened it meanwhile
                gate.wait()
        elif type(value) in (list, tuple):
            _wait_for(value)


_FACTS = frozenset(
    [
        *(getattr(torch.Tensor, name) for name in "dim ndimension size stride numel nelement element_size".split()),
        *(getattr(torch.Tensor, name) for name in "__len__ is_contiguous is_floating_point is_complex".split()),
        *(getattr(torch.Tensor, name) for name in "register_hook register_post_accumulate_grad_hook __hash__".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "shape dtype device layout ndim itemsize nbytes".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "is_cpu is_cuda is_meta is_sparse is_quantized".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "requires_grad grad grad_fn is_leaf".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "_backward_hooks _post_accumulate_grad_hooks".split()),
        *(getattr(torch.Tensor, name).__set__ for name in "requires_grad grad".split()),
        *(torch.Tensor.requires_grad_, torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.is_shared),
    ]
)
"""What is known of a tensor before its bytes are there, and what can be said to it."""
