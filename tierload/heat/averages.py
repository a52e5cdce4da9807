"""Exponentially weighted averages of vectors, which are right from the first value on."""

from __future__ import annotations

import torch

__all__ = ["Average"]


class Average:
    """The average of ``size`` numbers over steps. The host waits for no device before ``mean`` is read."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(size, device=device)
        self._weight = 0.0

    def update(self, new: torch.Tensor, half_life: float) -> None:
        """Takes one more step in, but for values that are not finite: a gradient scaler skips such a step."""
        fresh = 1 - 0.5 ** (1 / half_life)
        held = self._sum / self._weight if self._weight else self._sum
        self._sum.lerp_(torch.where(new.isfinite(), new, held), fresh)
        self._weight += (1 - self._weight) * fresh

    def mean(self) -> torch.Tensor:
        """The average so far, in float32; zeros before the first step."""
        return self._sum / self._weight if self._weight else self._sum.clone()

    def state_dict(self) -> dict[str, object]:
        """What the average is made of."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from such a state, of as many numbers."""
        total, weight = state["sum"], state["weight"]
        if not isinstance(total, torch.Tensor) or total.shape != self._sum.shape or not isinstance(weight, float):
            raise ValueError(f"the state is none of an average of {len(self._sum)} numbers")
        self._sum = total.to(self._sum.device, copy=True)
        self._weight = weight
