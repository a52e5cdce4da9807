"""Training goes on where it was, on as many ranks and on whatever mesh it is started again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch

import tierload
from tests.ranks.training import Run
from tests.ranks.world import results

WAYS: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2), (4, 1)],
    6: [(6,)],
    8: [(8,)],
}


def trained(rank: int, ranks: int, way: tuple[int, ...], path: str, late: bool) -> tuple[Any, Any, Any]:
    run = Run(way)
    tierload.guard(run.optimizer)
    run.train(2)
    if late:
        pending = tierload.async_save(run.state, path, step=run.step)
        before = run.whole()
        after = run.train(3)
        pending.durable()
    else:
        tierload.save(run.state, path, step=run.step)
        before = run.whole()
        after = run.train(3)
    return before, after, run.whole()


def resumed(rank: int, ranks: int, ways: list[tuple[int, ...]], path: str) -> list[tuple[Any, Any, Any]]:
    found = []
    for way in ways:
        run = Run(way, seed=5)  # other weights, and no moments yet
        state = run.state
        report: Any = tierload.load(path, into=state)
        assert not report.missing
        run.step = state["step"]
        found.append((run.whole(), run.train(3), run.whole()))
    return found


@pytest.fixture(scope="module")
def trained_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, ...]], tuple[str, Any]]:
    """Trains in one way, once: where it saved itself, and what it had."""

    @cache
    def train(way: tuple[int, ...]) -> tuple[str, Any]:
        path = str(tmp_path_factory.mktemp("runs") / "store")
        return path, results(prod(way), trained, way, path, way != (3,))[0]

    return train


@pytest.mark.parametrize(
    "ranks", [3, 4, 8, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in WAYS if ranks not in (3, 4, 8))]
)
@pytest.mark.parametrize(
    "origin",
    [(2, 2), pytest.param((4,), marks=pytest.mark.slow), pytest.param((3,), marks=pytest.mark.slow)],
    ids=str,
)
def test_weights_moments_and_losses_are_those_of_the_run_that_saved(
    trained_in: Callable[[tuple[int, ...]], tuple[str, Any]], origin: tuple[int, ...], ranks: int
) -> None:
    path, (before, after, end) = trained_in(origin)
    for every in results(ranks, resumed, WAYS[ranks], path):
        for way, (loaded, losses, final) in zip(WAYS[ranks], every, strict=True):
            assert loaded.keys() == before.keys()
            assert all(torch.equal(loaded[name], before[name]) for name in before), "bit for bit, on any ranks"
            if way == origin:
                assert losses == after
                assert all(torch.equal(final[name], end[name]) for name in end)
            # Other ranks add up gradients in another order.
            assert losses == pytest.approx(after, rel=1e-5)
