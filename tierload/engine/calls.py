"""Calls of modules in a hot start: each waits for its own tensors at once, and tells how far the pass is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tierload.engine.arriving import Arrivals
from tierload.state import Arriving
from tierload.tiers import UrgencyRule, urgency

__all__ = ["Calls"]

_READS_INNER = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
"""Modules of torch that hand the tensors of modules inside them to one function, and take a slower one while those are
not ordinary tensors."""

_FAR = np.iinfo(np.uint32).max


class Calls:
    """Hooks on the modules that hold arriving tensors, until each has been called with all of its own there.

    ``positions`` say how many kernels of a pass run before the first that uses a unit (infinite: none does).
    """

    def __init__(
        self,
        arrivals: Arrivals,
        modules: Iterable[torch.nn.Module],
        units: Sequence[Arriving],
        positions: np.ndarray[Any, np.dtype[np.float64]],
        rule: UrgencyRule = UrgencyRule(),  # noqa: B008 - frozen
    ) -> None:
        self._arrivals = arrivals
        self._modules = list(modules)
        self._unit_of = {id(tensor): number for number, unit in enumerate(units) for tensor in unit.tensors}
        self._positions = positions
        self._order = np.argsort(positions, kind="stable")
        self._sorted = positions[self._order]
        self._rule = rule
        self._raised: list[int] = []
        self._hooks: dict[int, tuple[list[int], torch.utils.hooks.RemovableHandle]] = {}  # by identity of the module

    def watch(self) -> None:
        """Puts the hooks on."""

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def before(module: torch.nn.Module, _: object) -> None:
            if id(module) not in self._hooks:
                return  # a copy of one, which has waited for all of its tensors
            own, handle = self._hooks[id(module)]
            handle.remove()
            self._arrivals.wait_for(own)
            self._reach(self._positions[own].min())

        for top in self._modules:
            for module in top.modules():
                own = self._own(module)
                if own and id(module) not in self._hooks:
                    self._hooks[id(module)] = own, module.register_forward_pre_hook(before, prepend=True)

    def close(self) -> None:
        """Takes those off that are left."""
        for _, handle in self._hooks.values():
            handle.remove()

    def _own(self, module: torch.nn.Module) -> list[int]:
        deep = isinstance(module, _READS_INNER)
        tensors = (*module.parameters(deep), *module.buffers(deep))
        return sorted({self._unit_of[id(tensor)] for tensor in tensors if id(tensor) in self._unit_of})

    def _reach(self, position: float) -> None:
        """The pass is so far: what it needs next gets high priority, what it has left behind is not urgent any more."""
        arrivals = self._arrivals
        if arrivals.ready or not np.isfinite(position):
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
