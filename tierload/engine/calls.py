"""Calls of modules in a hot start: each waits for its own tensors at once, and tells how far the pass is. A compilation
waits for the whole model: what it makes of one that is half there it would have to throw away."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tierload.engine.arriving import Arrivals
from tierload.state import Arriving, await_tensors, uncompiled
from tierload.tiers import UrgencyRule, urgency

__all__ = ["Calls"]

_FAR = np.iinfo(np.uint32).max


class Calls:
    """A hook on all modules: the first call of each waits for the arriving tensors that it has. It is on no module, so
    whoever copies or pickles one finds nothing of it there.

    ``positions`` say how many kernels of a pass run before the first that uses a unit (infinite: none does).
    """

    def __init__(
        self,
        arrivals: Arrivals,
        units: Sequence[Arriving],
        positions: np.ndarray[Any, np.dtype[np.float64]],
        rule: UrgencyRule = UrgencyRule(),  # noqa: B008 - frozen
    ) -> None:
        self._arrivals = arrivals
        self._unit_of = {id(tensor): number for number, unit in enumerate(units) for tensor in unit.tensors}
        self._compiled = [number for number, unit in enumerate(units) if not unit.state]
        self._positions = positions
        self._order = np.argsort(positions, kind="stable")
        self._sorted = positions[self._order]
        self._rule = rule
        self._raised: list[int] = []
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._listens = False

    def watch(self) -> None:
        """Puts the hook on."""

        @uncompiled
        def before(module: torch.nn.Module, _: object) -> None:
            self._before(module)

        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(before)
        self._listen()

    def close(self) -> None:
        """Takes it off."""
        if self._hook is not None:
            self._hook.remove()
        if self._listens:
            callbacks = sys.modules["torch._dynamo"].callback_handler
            callbacks.start_callbacks = [one for one in callbacks.start_callbacks if one != self._compiles]
            self._listens = False

    def _listen(self) -> None:
        """Hears of compilations, as soon as torch's compiler is there."""
        if not self._listens and "torch._dynamo" in sys.modules:
            importlib.import_module("torch._dynamo").callback_handler.register_start_callback(self._compiles)
            self._listens = True

    def _compiles(self, _: object) -> None:
        self._arrivals.wait_for_whole(self._compiled)
        if self._hook is not None and all(map(self._arrivals.is_ready, self._compiled)):
            self._hook.remove()

    def _before(self, module: torch.nn.Module) -> None:
        self._listen()
        if module in self._called:
            return
        tensors = [one for one in _tensors(module) if id(one) in self._unit_of]
        if tensors:
            own = sorted({self._unit_of[id(one)] for one in tensors})
            self._arrivals.ask_for(own)
            await_tensors(tensors)  # as they are now: of a lost one another load may have made something
            self._reach(self._positions[own].min())
        self._called.add(module)

    def _reach(self, position: float) -> None:
        """The pass is so far: what it needs next gets high priority, what it has left behind is not urgent any more."""
        arrivals = self._arrivals
        if arrivals.ready or arrivals.elsewhere or not np.isfinite(position):
            return
        self._raised = [unit for unit in self._raised if not arrivals.is_ready(unit)]
        begin = int(np.searchsorted(self._sorted, position))
        for at in range(begin, len(self._order)):
            unit = int(self._order[at])
            urgent = float(urgency.urgency(self._sorted[at] - position, self._rule))
            if urgency.priority(urgent, len(self._raised), self._rule) == "normal":
                break
            if not arrivals.is_ready(unit) and unit not in self._raised:
                self._raised.append(unit)
        behind = [unit for unit in self._order[:begin].tolist() if not arrivals.is_ready(unit)]
        if self._raised or behind:
            arrivals.native.order(
                np.array([*behind, *self._raised], np.uint32),
                np.array([_FAR] * len(behind) + list(range(len(self._raised))), np.uint32),
            )


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a call of a module uses before modules inside it are called. Some modules hand those of others
    to C++, and take another way while these are not ordinary ones."""
    if isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)):
        yield from (*module.parameters(), *module.buffers())
    elif isinstance(module, torch.nn.TransformerEncoder):
        for first in module.layers[:1]:
            yield from first.parameters()
    elif isinstance(module, torch.nn.parallel.DistributedDataParallel):
        yield from module.buffers()
    else:
        yield from (*module.parameters(False), *module.buffers(False))
