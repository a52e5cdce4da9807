"""Ranks save and resume together, and end after the same step. B86: and on another number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import tierload
from tests.ranks.world import Outcome, results, world

SAMPLES, BATCH = 24, 3  # on two ranks 4 batches an epoch


def loop(rank: int, ranks: int, path: str, steps: int, told: str = "", when: int = 0) -> tuple[list[str], list[int]]:
    """Losses, and the samples that this rank was given. ``told`` to end in step ``when`` is the last rank alone."""
    torch.manual_seed(rank if not os.path.exists(path) else 50 + rank)
    dropout = torch.nn.Dropout(0.4)  # each rank draws its own
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    sampler = StatefulDistributedSampler(range(SAMPLES), ranks, rank, shuffle=True)  # type: ignore[arg-type]
    loader = StatefulDataLoader(torch.arange(SAMPLES), BATCH, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    losses, samples = [], []
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    with tierload.Session(path, every=2, keep=2, **parts) as run:
        batches = run.batches(loader)
        for step in run.steps(steps):
            batch = next(batches)
            samples += batch.tolist()
            loss = (model(dropout(batch[:, None] / SAMPLES)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if rank == ranks - 1 and step == when:
                if told == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    run.stop()
            run.log(loss=loss, rank=rank)
            losses.append(f"{step} {loss.item().hex()}")
    return losses, samples


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return [losses for losses, _ in results(2, loop, str(tmp_path_factory.mktemp("whole") / "run"), 14)]


def test_all_ranks_end_after_the_step_after_the_one_in_which_one_was_told(
    tmp_path: Path, whole: list[list[str]]
) -> None:
    path = str(tmp_path / "run")
    for outcome in world(2, loop, path, 14, "signal", 5):
        assert isinstance(outcome.exception, SystemExit)
        assert outcome.exception.code == 128 + signal.SIGTERM
    with tierload.open(path) as store:
        assert [commit.step for commit in store.commits()][:2] == [6, 4]
        assert store.head().metrics["rank"] == 0  # type: ignore[union-attr]
        assert store.verify(full=True).ok
    stopped = results(2, loop, path, 14, "stop", 9)
    rest = results(2, loop, path, 14)
    for rank in range(2):
        assert stopped[rank][0] + rest[rank][0] == whole[rank][6:]
        assert [loss.split()[0] for loss in stopped[rank][0]] == ["7", "8", "9", "10"]
    with tierload.open(path) as store:
        assert [commit.step for commit in store.commits()] == [14, 12]


def refusals(outcomes: list[Outcome]) -> list[str]:
    return [f"{type(outcome.exception).__name__}: {outcome.exception}" for outcome in outcomes]


def test_b86_another_number_of_ranks_goes_on_from_an_epochs_end_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    results(4, loop, path, 3)
    for refusal in refusals(world(2, loop, path, 8)):
        assert "InvalidRequest: loader was saved in the midst of epoch 1, after 1 batches" in refusal
        assert "number of ranks was 4 and is 2" in refusal
    results(4, loop, path, 4)
    found = results(2, loop, path, 8)
    assert sorted(found[0][1] + found[1][1]) == [*range(SAMPLES)]  # each sample once in the next epoch
