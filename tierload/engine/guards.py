"""Optimizers that change their tensors only in ``step``, and wait there for what a save is still copying."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierload import _native
from tierload.state import ROOT, TORCH, GatedParameter, GatedTensor, is_plain_tensor, is_spread, local_part

__all__ = ["Guard", "Settling", "guard", "guarded", "guarded_memory", "settle_all", "settled", "settles_later"]


class Settling(Protocol):
    """A save that is still copying."""

    def settle(self) -> None:
        """Returns when the state may change."""


class Guard:
    """What ``guard`` says of an optimizer. ``reason`` is why its tensors are copied before the call of a save returns
    all the same, or ``""`` when they are copied beside the next forward and backward pass."""

    def __init__(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.reason = reason

    def remove(self) -> None:
        """From the next save on, the optimizer is guarded no more."""
        optimizer = self._optimizer()
        if optimizer is not None and _guards.get(optimizer) is self:
            del _guards[optimizer]

    def __repr__(self) -> str:
        return f"Guard({self.reason or 'copied beside the next steps'})"


_lock = threading.RLock()
_guards: weakref.WeakKeyDictionary[torch.optim.Optimizer, Guard] = weakref.WeakKeyDictionary()
_settling: dict[Settling, None] = {}  # without a lock: a signal handler may interrupt whoever would hold it
_hooked = False


def guard(optimizer: torch.optim.Optimizer, *, steps_elsewhere: bool = False) -> Guard:
    """Lets asynchronous saves copy an optimizer's parameters and states beside the next forward and backward pass: they
    change in its ``step()`` only, and that waits for what is left.

    All other tensors, and everything else in a state, are copied before ``async_save`` returns. So are those of an
    optimizer whose step cannot be waited in; ``reason`` of the result says why. ``steps_elsewhere=True`` declares such
    a one: its step also runs where no hook sees it, as in a captured graph or in another process. Whoever changes
    weights between the steps does it inside ``with pending.mutating():``. Guarding twice is fine.
    """
    global _hooked
    reason = "it was declared that it also steps elsewhere" if steps_elsewhere else _why_not(optimizer)
    with _lock:
        if not _hooked:
            # Of every optimizer: another one may have the same tensors. (torch's compiler is loaded only now.)
            register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]
            _hooked = True
        found = Guard(optimizer, reason)
        _guards[optimizer] = found
        return found


def guarded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``guard`` was called for an optimizer, whatever came of it."""
    with _lock:
        return optimizer in _guards


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why no hook can wait in an optimizer's step, or ``""``."""
    if not getattr(type(optimizer).step, "hooked", False):
        return f"{type(optimizer).__name__}.step runs no hooks"
    plain = (each for each in _parameters(optimizer) if each.is_cpu and _is_plain(each))
    if any(parameter.is_shared() for parameter in plain if parameter.layout is torch.strided):
        return "its parameters are in shared memory, where other processes can change them"
    return _why_not_now(optimizer)


def _why_not_now(optimizer: torch.optim.Optimizer) -> str:
    """The reasons that may come after ``guard`` was called, as far as they concern all parameters."""
    if any(parameter._post_accumulate_grad_hooks for parameter in _parameters(optimizer)):
        return "its parameters have hooks that run in backward, as a step in backward needs them"
    if any(group.get("capturable") for group in optimizer.param_groups) and any(
        parameter.is_cuda for parameter in _parameters(optimizer)
    ):
        return "it is capturable, and a graph that contains its step runs no hooks"
    return ""


def _is_plain(tensor: object) -> bool:
    return is_plain_tensor(tensor) or isinstance(tensor, (GatedParameter, GatedTensor))  # which will be one


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def guarded_memory(least_bytes: int) -> _native.GuardedMemory | None:
    """Parameters and states of all guarded optimizers that have at least so many bytes; None when there are none."""
    with _lock:
        tensors: list[object] = []
        for optimizer, found in list(_guards.items()):
            if not found.reason:
                found.reason = _why_not_now(optimizer)
            if found.reason:
                continue
            tensors += map(_memory_of, _parameters(optimizer))
            for state in optimizer.state.values():
                tensors += map(_memory_of, state.values())  # what is no tensor is left out, as are small ones
    if not tensors:
        return None
    try:
        return _native.GuardedMemory(TORCH, tensors, least_bytes)
    except RuntimeError:
        return None  # tensors of inference mode count no changes: nobody could tell whether the copy is whole


def _memory_of(value: Any) -> object:
    """A tensor; of one that is spread over ranks, with this rank's part of it."""
    return (value, local_part(value, ROOT)) if is_spread(value) else value


def settles_later(save: Settling) -> None:
    """From now on, every optimizer's step waits for ``save``, until it is ``settled``."""
    _settling[save] = None


def settled(save: Settling) -> None:
    """Nobody waits for ``save`` any more."""
    _settling.pop(save, None)


def settle_all() -> None:
    """Waits until no save copies from the state of the caller any more."""
    for save in list(_settling):
        save.settle()


def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if _settling:
        settle_all()


def _forget() -> None:
    # A forked child has neither the threads that copy nor the memory that they copy to.
    global _lock
    _lock = threading.RLock()
    _settling.clear()


os.register_at_fork(after_in_child=_forget)
