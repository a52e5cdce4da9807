"""How soon what is to be loaded is needed: pure functions of positions in a pass, for a queue that knows ranks only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["UrgencyRule", "priority", "ranks", "urgency"]

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class UrgencyRule:
    """What counts as urgent. A frozen value: to change it while loading, use another one from then on.

    ``near``: a consumer at most that many kernels away makes a unit urgent. ``threshold``: urgent is more than that.
    ``queued_max``: with that many requests queued nothing more gets high priority.

    Raises:
        ValueError: ``near`` or ``queued_max`` is negative, or ``threshold`` not between 0 and 1.
    """

    near: int = 2
    threshold: float = 0.7
    queued_max: int = 8

    def __post_init__(self) -> None:
        if self.near < 0 or self.queued_max < 0:
            raise ValueError(f"near is {self.near} and queued_max is {self.queued_max}; use 0 or more")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold is {self.threshold}; use a number between 0 and 1")


_STANDARD = UrgencyRule()


def urgency(distance: npt.ArrayLike, rule: UrgencyRule = _STANDARD) -> Numbers:
    """Urgency in [0, 1] by the distance in kernels to the consumer: threshold^(distance / (near + 1)).

    It is 1 for what is needed now or overdue, falls evenly by a factor, and crosses the threshold between ``near`` and
    the kernel after it; 0 for what is never needed (an infinite distance).
    """
    ahead = np.maximum(np.asarray(distance, np.float64), 0)
    return np.power(rule.threshold, ahead / (rule.near + 1))


def priority(urgent: float, queued: int, rule: UrgencyRule = _STANDARD) -> Literal["high", "normal"]:
    """``"high"`` above the threshold, as long as fewer than ``queued_max`` requests are queued: with more of them the
    order of the queue does it, and a second class would only reorder what is urgent."""
    return "high" if urgent > rule.threshold and queued < rule.queued_max else "normal"


def ranks(distance: Numbers, heat: npt.ArrayLike | None = None) -> npt.NDArray[np.uint32]:
    """The rank of each unit in the order of loading, 0 for the first: by distance, among equals the hotter first, then
    in the order that they have. Units without a next use come last, among them the hotter first.

    Raises:
        ValueError: There is not one heat for each unit.
    """
    warmth = np.zeros(len(distance)) if heat is None else np.asarray(heat, np.float64)
    if warmth.shape != distance.shape:
        raise ValueError(f"there are {warmth.size} heats for {len(distance)} units; give one for each")
    found = np.empty(len(distance), np.uint32)
    found[np.lexsort((-warmth, distance))] = np.arange(len(distance), dtype=np.uint32)
    return found
