"""Gradient activity: an average of each parameter's gradient norm, and what the optimizer itself keeps of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierload.heat.averages import Average

__all__ = ["GradientActivity", "second_moments"]


class GradientActivity:
    """The average norm of each parameter's gradient, by steps; one without gradient counts as 0."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._device = parameters[0].device
        self._none = torch.zeros((), device=self._device)
        self.average = Average(len(parameters), self._device)

    def update(self, half_life: float) -> torch.Tensor:
        """Takes the gradients of one step in, without waiting for a device, and returns their norms."""
        gradients = [parameter.grad for parameter in self._parameters]
        found = [_dense(gradient) for gradient in gradients if gradient is not None]
        norms = iter(torch._foreach_norm(found) if found else ())
        each = [self._none if gradient is None else next(norms) for gradient in gradients]
        moved = [norm.to(self._device, torch.float32, non_blocking=True) for norm in each]
        norms_of_step = torch.stack(moved)
        self.average.update(norms_of_step, half_life)
        return norms_of_step


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient; rows of a sparse one that are there."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def second_moments(
    parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[torch.Tensor | None]:
    """The averages of squared gradients that Adam and its kin keep for each parameter; None where there is none of its
    shape."""
    found: list[torch.Tensor | None] = []
    for parameter in parameters:
        moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
        usable = isinstance(moment, torch.Tensor) and moment.shape == parameter.shape and moment.is_floating_point()
        found.append(moment if usable else None)
    return found
