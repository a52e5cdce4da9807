"""Locality of access: how often, and how early in a step, forward passes use each parameter; which rows of tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tierload.heat.averages import Average
from tierload.heat.experts import chosen_experts, moved_experts, stacked_experts

__all__ = ["Locality"]

_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class _Recent:
    """How often each of ``size`` things is used in a step: recently, and over a long time."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.short, self.long = Average(size, device), Average(size, device)

    def update(self, seen: torch.Tensor, half_lives: tuple[float, float]) -> None:
        for average, half_life in zip((self.short, self.long), half_lives, strict=True):
            average.update(seen, half_life)

    def mean(self) -> torch.Tensor:
        return ((self.short.mean() + self.long.mean()) / 2).cpu()

    def state_dict(self) -> dict[str, object]:
        return {"short": self.short.state_dict(), "long": self.long.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.short.load_state_dict(state["short"])
        self.long.load_state_dict(state["long"])


class Locality:
    """What hooks on the modules of a model see: their own parameters are used, in this order. Of embeddings the rows
    are counted as well, and of stacked experts those that were chosen; of other tables the rows that ``touch`` is told.

    Only passes with gradients count: an evaluation is none of the training. The order is that of any passes, since a
    checkpoint of activations that is reentrant passes first without gradients, and again in the reverse order.
    Inside of compiled code hooks are not seen: there a parameter, or one expert of a stack, counts as used when it has
    a gradient that is not zero.
    """

    def __init__(self, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._positions = {parameter: at for at, parameter in enumerate(parameters)}
        self._recent = _Recent(len(parameters), parameters[0].device)
        self._rows: dict[int, _Recent] = {}
        self._seen_rows: dict[int, torch.Tensor] = {}  # of this step, 1 where seen
        self._told: set[int] = set()  # tables whose rows the caller knows better than hooks do
        self._stacks = {
            self._positions[parameter]
            for module in model.modules()
            for parameter in stacked_experts(module)
            if parameter in self._positions
        }
        self._chosen: set[int] = set()  # stacks whose experts the inputs of this step told
        self._order: list[int] = []  # of the last step that was seen
        self._now: set[int] = set()  # those that passes with gradients have used since the last step
        self._passed: dict[int, None] = {}  # those that any passes have used since, in this order
        self.paused = False
        self._hooks = [
            module.register_forward_pre_hook(_Watch(self, module), with_kwargs=True)
            for module in model.modules()
            if any(parameter is not None for parameter in module._parameters.values())
        ]

    def remove(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def enter(self, module: torch.nn.Module, inputs: Sequence[object]) -> None:
        """A module is about to run with these inputs."""
        if self.paused:
            return
        own = [
            self._positions[one] for one in module._parameters.values() if one is not None and one in self._positions
        ]
        self._passed.update(dict.fromkeys(own))
        if not torch.is_grad_enabled():
            return
        self._now.update(own)
        for at in own:
            if isinstance(module, _TABLES) and inputs and isinstance(inputs[0], torch.Tensor):
                self._see(at, inputs[0])
            elif at in self._stacks:
                self._see_choice(at, inputs)
            elif at in self._rows and at not in self._told:
                self._seen_rows[at].fill_(1)  # a table that is also used as a whole, as a tied head does

    def touch(self, at: int, rows: torch.Tensor) -> None:
        """Rows of parameter number ``at``, and no others, are used in this step; the host waits for no device."""
        self._told.add(at)
        self._now.add(at)
        self._passed.setdefault(at)
        self._see(at, rows)

    def _see(self, at: int, rows: torch.Tensor) -> None:
        self._know_rows(at)
        index = rows.detach().reshape(-1).to(self._parameters[at].device, torch.int64)
        self._seen_rows[at].index_fill_(0, index, 1)

    def _know_rows(self, at: int) -> None:
        """From now on the rows of this parameter are counted."""
        parameter = self._parameters[at]
        if at not in self._rows:
            self._rows[at] = _Recent(len(parameter), parameter.device)
            self._seen_rows[at] = torch.zeros(len(parameter), device=parameter.device)

    def step(self, half_lives: tuple[float, float], norms: torch.Tensor) -> None:
        """A step of the training ends, in which the parameters' gradients had these ``norms``."""
        for at in self._stacks - self._told - self._chosen:
            self._see_gradient(at)
        seen = torch.tensor([float(at in self._now) for at in range(len(self._parameters))])
        self._recent.update(torch.maximum(seen.to(norms.device, non_blocking=True), (norms != 0).float()), half_lives)
        for at, rows in self._seen_rows.items():
            self._rows[at].update(rows, half_lives)
            rows.zero_()
        self._chosen.clear()
        if self._now:
            self._order = [at for at in self._passed if at in self._now]
        self._now, self._passed = set(), {}

    def _see_choice(self, at: int, inputs: Sequence[object]) -> None:
        chosen = None if at in self._told else chosen_experts(inputs, self._parameters[at])
        if chosen is not None:
            self._chosen.add(at)
            self._know_rows(at)
            self._seen_rows[at] = torch.maximum(self._seen_rows[at], chosen)

    def _see_gradient(self, at: int) -> None:
        """Of a stack whose inputs did not say which experts were chosen: those that have a gradient. Where there is
        none (frozen ones) it was used as a whole, if at all."""
        gradient = self._parameters[at].grad
        if gradient is not None and gradient.layout is torch.strided:
            self._know_rows(at)
            self._seen_rows[at].copy_(moved_experts(gradient))
        elif at in self._rows and at in self._now:
            self._seen_rows[at].fill_(1)

    def next_uses(self) -> dict[int, int]:
        """By position, how many others a step uses before that parameter; of those that the last step used."""
        return {at: distance for distance, at in enumerate(self._order)}

    def values(self) -> list[float]:
        """Of each parameter, how often it is used in a step, times exp(-next use / uses of a step): with equal
        frequency what comes first is more local."""
        uses = self.next_uses()
        return [
            frequency * math.exp(-uses.get(at, 0) / max(len(uses), 1))
            for at, frequency in enumerate(self._recent.mean().tolist())
        ]

    def rows(self, at: int) -> torch.Tensor | None:
        """Of each row of a table, how often it is used in a step; None of parameters that are used as a whole."""
        recent = self._rows.get(at)
        return None if recent is None else recent.mean()

    def state_dict(self) -> dict[str, object]:
        """What was seen in whole steps."""
        rows = {at: recent.state_dict() for at, recent in self._rows.items()}
        told = sorted(self._told)
        return {"recent": self._recent.state_dict(), "rows": rows, "told": told, "order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from such a state."""
        self._recent.load_state_dict(state["recent"])
        self._rows, self._seen_rows = {}, {}
        self._now, self._passed = set(), {}
        for at, saved in state["rows"].items():
            self._know_rows(int(at))
            self._rows[int(at)].load_state_dict(saved)
        self._told = {int(at) for at in state["told"]}
        self._order = [int(at) for at in state["order"]]


class _Watch:
    """The hook on one module. A copy of the module (an average of weights, a pickle) has one that sees nothing."""

    def __init__(self, locality: Locality | None = None, module: torch.nn.Module | None = None) -> None:
        self._locality, self._module = locality, module

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling() and self._locality is not None and module is self._module:
            self._locality.enter(module, (*inputs, *named.values()))

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()
