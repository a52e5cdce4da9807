"""Tensors that are not there yet: the first use of one waits for it.

A gated tensor is the same object as ever, of a class whose every function waits; it becomes an ordinary one when it has
arrived. torch does the same to its lazily initialised parameters.

What it does not see are uses that never ask Python:
- another tensor over the same memory that was made before: the flat one of ``parameter.data = flat[a:b]``, say;
- TorchScript: ``torch.jit.script`` of a module whose tensors are on their way, and its calls;
- C++ functions that take tensors as they are: extensions bound with pybind11, ``torch.Tensor._make_subclass``,
  transforms of ``torch.func`` over a bare tensor (``grad``, ``vmap``), and ``send`` and ``reduce`` of
  torch.distributed, whose other collectives wait.
A call of the module that has the tensor comes before the last two, and waits (``engine.calls``). ``Parameter(p)`` of a
parameter that is not there yet is refused by torch, which compares types before and after: ``Parameter(p.data)`` works.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Gate", "GatedParameter", "GatedTensor", "Lost", "await_tensors", "uncompiled"]

Wait = Callable[[], None]
"""Returns when the bytes are there; raises what is wrong with them."""

P = ParamSpec("P")
T = TypeVar("T")

_GATE = "_tierload_gate"


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Keeps torch's compiler out of a function, and does not load it for that: it takes seconds."""

    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        found = function if "torch._dynamo" not in sys.modules else _disabled(function)
        return found(*args, **kwargs)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


class Gate:
    """Makes tensors wait once it is ``shut``. ``wait`` is called by their first use, by whatever thread; ``open`` lets
    them be. ``end`` returns when nobody writes to them any more, whether they are complete or not."""

    def __init__(self, tensors: Iterable[torch.Tensor], wait: Wait, end: Callable[[], None]) -> None:
        self.wait = wait
        self.end = end
        self._tensors = tuple(tensors)

    def shut(self) -> None:
        """From here on they wait."""
        for tensor in self._tensors:
            _shut(tensor, self)

    def open(self) -> None:
        """They are there."""
        for tensor in self._tensors:
            _let_be(tensor)


class _Gated:
    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        await_tensors(args)
        if kwargs:
            await_tensors(kwargs.values())
        return func(*args, **(kwargs or {}))  # once more from the beginning: others may have a word in it

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        await_tensors((self,))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        await_tensors((self,))
        return self.__reduce_ex__(protocol)

    def as_subclass(self, cls: Any) -> Any:
        """As torch's, which asks nobody."""
        await_tensors((self,))
        return torch.Tensor.as_subclass(self, cls)  # type: ignore[arg-type]


class GatedParameter(_Gated, torch.nn.Parameter):
    """A parameter that is not there yet."""


class GatedTensor(_Gated, torch.Tensor):
    """A buffer, or another tensor, that is not there yet."""


_ORDINARY: dict[type, type] = {GatedParameter: torch.nn.Parameter, GatedTensor: torch.Tensor}


def await_tensors(values: Iterable[Any]) -> None:
    """Waits for those of some values that are tensors on their way, also in containers among them.

    Raises:
        CorruptPage: One is damaged.
    """
    for value in values:
        if isinstance(value, _Gated):
            gate: Gate | None = vars(value).get(_GATE)
            if gate is None:
                _let_be(value)  # somebody has made it, as ``type(parameter)(...)``
            else:
                gate.wait()
        elif isinstance(value, (list, tuple)):
            await_tensors(value)
        elif isinstance(value, dict):
            await_tensors(value.values())


class Lost:
    """Tensors that will never come, since their bytes are damaged or nobody fetches them any more, and that a load is
    to fill with others: they do not wait while it looks at them."""

    def __init__(self) -> None:
        self._tensors: list[tuple[torch.Tensor, Gate]] = []

    def await_tensor(self, tensor: torch.Tensor) -> None:
        """Waits for a tensor; one that will never come is let be."""
        gate = vars(tensor).get(_GATE) if isinstance(tensor, _Gated) else None
        try:
            await_tensors((tensor,))
        except (OSError, RuntimeError, MemoryError):
            assert gate is not None
            gate.end()  # pages of it that are whole may come after the one that is not
            _let_be(tensor)
            self._tensors.append((tensor, gate))

    def shut(self, filled: Container[int] = ()) -> None:
        """Uses of them raise as before, but for those that are ``filled``, by identity."""
        for tensor, gate in self._tensors:
            if id(tensor) not in filled and not isinstance(tensor, _Gated):
                _shut(tensor, gate)


def _shut(tensor: torch.Tensor, gate: Gate) -> None:
    vars(tensor)[_GATE] = gate
    tensor.__class__ = GatedParameter if type(tensor) is torch.nn.Parameter else GatedTensor


def _let_be(tensor: Any) -> None:
    """The class first: as long as a tensor is of a class that waits, it has a gate."""
    kind = type(tensor)
    if kind in _ORDINARY:
        tensor.__class__ = _ORDINARY[kind]
    vars(tensor).pop(_GATE, None)


_HOOKS = "_post_accumulate_grad_hooks"

_FACTS = frozenset(
    [
        *(getattr(torch.Tensor, name) for name in "dim ndimension size stride numel nelement element_size".split()),
        *(getattr(torch.Tensor, name) for name in "__len__ is_contiguous is_floating_point".split()),
        *(getattr(torch.Tensor, name) for name in "register_hook register_post_accumulate_grad_hook __hash__".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "shape dtype device layout ndim itemsize nbytes".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "is_cpu is_cuda is_meta is_sparse is_quantized".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "requires_grad grad grad_fn is_leaf _backward_hooks".split()),
        getattr(torch.Tensor, _HOOKS).__get__,
        *(getattr(torch.Tensor, name).__set__ for name in "requires_grad grad".split()),
        *(torch.Tensor.requires_grad_, torch.is_floating_point, torch.numel, torch.Tensor.is_shared),
    ]
)
"""What is known of a tensor before its bytes are there, and what can be said to it. ``is_complex`` is not among it: it
is what torch.distributed asks a tensor before it hands it to C++."""
