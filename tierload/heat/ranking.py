"""Terms of different scales, made comparable: each ranked to [0, 1], then their weighted sum."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Heat", "Weights", "checked_weights", "heats", "ranked"]

Weights = tuple[float, float, float]


class Heat(NamedTuple):
    """Heat of a parameter or of one page of it, and its three terms, all in [0, 1] and relative to the same model."""

    gradient: float
    radius: float
    locality: float
    heat: float


def ranked(values: Sequence[float]) -> list[float]:
    """How many values lie below each, as a part of what lies below the largest: the largest is 1, the smallest 0, equal
    ones are equal. Ranks, since raw radii span orders of magnitude between the parts of one model."""
    order = sorted(values)
    below = [bisect_left(order, value) for value in values]
    most = max(below, default=0) or 1
    return [count / most for count in below]


def heats(
    gradients: Sequence[float], radii: Sequence[float], localities: Sequence[float], weights: Weights
) -> list[Heat]:
    """The heat of each unit by its three raw terms."""
    terms = zip(ranked(gradients), ranked(radii), ranked(localities), strict=True)
    return [Heat(*term, sum(weight * value for weight, value in zip(weights, term, strict=True))) for term in terms]


def checked_weights(weights: Sequence[float]) -> Weights:
    """Weights of gradient, radius and locality.

    Raises:
        ValueError: They are not three, one is negative, or they do not sum to 1.
    """
    if len(weights) != 3 or not all(weight >= 0 for weight in weights) or not math.isclose(sum(weights), 1):
        raise ValueError(f"weights are {tuple(weights)}; use three that are 0 or more and sum to 1")
    gradient, radius, locality = map(float, weights)
    return gradient, radius, locality
