"""The harness itself: what tests of many ranks rest on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.world import World, results, world


def summed(rank: int, ranks: int, factor: int) -> float:
    number = torch.tensor(float(rank * factor))
    dist.all_reduce(number)
    return number.item()


def in_all_ways(rank: int, ranks: int) -> int:
    if rank == 1:
        raise ValueError("of rank 1")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        print("rank 3 was here")
    return rank


def for_ever(rank: int, ranks: int) -> None:
    while rank == 1:
        time.sleep(1)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_all_ranks_run_a_function_in_one_group(store: str) -> None:
    assert results(4, summed, 10, store=store) == [60.0] * 4


def test_every_rank_ends_in_its_own_way() -> None:
    outcomes = world(4, in_all_ways)
    assert [outcome.status for outcome in outcomes] == [0, 0, -signal.SIGKILL, 0]
    assert [outcome.result for outcome in outcomes] == [0, None, None, 3]
    assert isinstance(outcomes[1].exception, ValueError)
    assert "in_all_ways" in outcomes[1].exception.__notes__[0]
    assert "rank 3 was here" in outcomes[3].said


def test_what_a_rank_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="of rank 1"):
        results(2, in_all_ways)


def test_ranks_that_do_not_end_are_killed_and_it_is_said_where_they_stood() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] had not ended") as found:
        world(2, for_ever, limit=2.0)
    assert "in for_ever" in str(found.value)


def test_ranks_can_be_stopped_continued_and_killed() -> None:
    running = World(2, for_ever, (), "tcp")
    running.signal(1, signal.SIGSTOP)
    running.signal(1, signal.SIGCONT)
    assert [outcome.status for outcome in running.outcomes(kill={1: 0.2})] == [0, -signal.SIGKILL]
