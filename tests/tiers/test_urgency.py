"""Urgency: what is near is urgent, what is far is not, and ranks follow the next use."""

from __future__ import annotations

import numpy as np
import pytest

from tierload.tiers.urgency import UrgencyRule, priority, ranks, urgency


def test_at_most_two_kernels_away_is_urgent() -> None:
    found = urgency([-3, 0, 1, 2, 3, 100, np.inf])
    assert found.tolist()[:2] == [1, 1]
    assert (found[:4] > 0.7).all()
    assert not (found[4:] > 0.7).any()
    assert (np.diff(found[1:]) < 0).all()
    assert found[-1] == 0


@pytest.mark.parametrize(("near", "threshold"), [(0, 0.5), (5, 0.7), (40, 0.99)])
def test_the_rule_can_be_set(near: int, threshold: float) -> None:
    rule = UrgencyRule(near, threshold)
    found = urgency([near, near + 1], rule)
    assert found[0] > threshold >= found[1]


def test_few_requests_are_of_high_priority() -> None:
    assert priority(0.71, 7) == "high"
    assert priority(0.71, 8) == priority(0.7, 0) == "normal"
    assert priority(0.6, 8, UrgencyRule(threshold=0.5, queued_max=9)) == "high"


@pytest.mark.parametrize("wrong", [{"near": -1}, {"queued_max": -1}, {"threshold": 0.0}, {"threshold": float("nan")}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"use (0 or more|a number between)"):
        UrgencyRule(**wrong)  # type: ignore[arg-type]


def test_among_equals_the_hotter_comes_first() -> None:
    ahead = np.array([3, 3, 0, np.inf, np.inf])
    found = ranks(ahead, [0.1, 0.9, 0.0, 0.2, 0.3])
    assert found.dtype == np.uint32
    assert found.tolist() == [2, 1, 0, 4, 3]
    assert ranks(ahead).tolist() == [1, 2, 0, 3, 4]
    with pytest.raises(ValueError, match="2 heats for 5 units"):
        ranks(ahead, [0.1, 0.2])
