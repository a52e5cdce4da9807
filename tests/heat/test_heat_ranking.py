"""Terms become ranks, and ranks a sum."""

from __future__ import annotations

import pytest

from tierload.heat.ranking import checked_weights, heats, ranked


def test_the_smallest_is_0_and_the_largest_1_whatever_their_scale() -> None:
    assert ranked([1e-9, 3.0, 1e12]) == [0.0, 0.5, 1.0]


def test_equal_ones_are_equal_and_frozen_ones_stay_cold() -> None:
    assert ranked([0.0, 7.0, 0.0, 9.0, 9.0]) == [0.0, pytest.approx(2 / 3), 0.0, 1.0, 1.0]


@pytest.mark.parametrize("values", [[], [4.0], [2.0, 2.0]])
def test_what_tells_nothing_apart_is_0(values: list[float]) -> None:
    assert ranked(values) == [0.0] * len(values)


def test_heat_is_the_weighted_sum() -> None:
    first, second = heats([1, 2], [2, 1], [1, 2], (0.5, 0.3, 0.2))
    assert first == (0.0, 1.0, 0.0, pytest.approx(0.3))
    assert second == (1.0, 0.0, 1.0, pytest.approx(0.7))


@pytest.mark.parametrize("weights", [(1, 0), (0.5, 0.5, 0.5), (1.5, -0.5, 0.0), (float("nan"), 0.5, 0.5)])
def test_weights_that_make_no_sense_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        checked_weights(weights)
