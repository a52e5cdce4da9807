"""Ranks that are killed or frozen: real processes, each with its own connection to the store."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks.support import LIMIT, a_save, channel_of, joined, said, shared
from tests.ranks.world import results, world
from tierload.errors import RankLost


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- killed --------------------------------------------------------------------------------------------------------
def killed_before_its_part(rank: int, ranks: int, victim: int) -> Any:
    channel = channel_of(rank, ranks)
    a_save(channel)
    dist.barrier()
    if rank == victim:
        die()
    return said(channel)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_a_rank_that_was_killed_is_lost_at_once(store: str) -> None:
    outcomes = world(4, killed_before_its_part, 2, store=store, limit=30)  # the ranks' own limit is a minute
    for rank in (0, 1, 3):
        ranks, text = outcomes[rank].result
        assert ranks == (2,)
        assert "rank 2 (" in text
        assert "has ended" in text
        assert "'commit'" in text


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_rank_0_that_was_killed_is_lost_at_once_whoever_holds_the_store(store: str) -> None:
    outcomes = world(3, killed_before_its_part, 0, store=store, limit=30)
    for outcome in outcomes[1:]:
        ranks, text = outcome.result
        assert ranks == (0,)
        assert "has ended" in text


def killed_after_its_part(rank: int, ranks: int) -> Any:
    channel = channel_of(rank, ranks)
    channel.begin()
    if rank == 1:
        board = channel._board
        add = board.add

        def add_and_die(key: str, amount: int) -> int:
            counted = add(key, amount)
            if key.startswith("state/"):
                die()
            return counted

        board.add = add_and_die  # type: ignore[method-assign]
    first = channel.round("describe", b"%d" % rank, joined)
    return first, said(channel)


def test_the_part_of_a_rank_that_was_killed_counts_and_the_next_round_names_it() -> None:
    outcomes = world(3, killed_after_its_part, limit=30)
    assert outcomes[1].status == -signal.SIGKILL
    for rank in (0, 2):
        first, (ranks, text) = outcomes[rank].result
        assert first == b"0,1,2"
        assert ranks == (1,)
        assert "has ended" in text


# ---- frozen --------------------------------------------------------------------------------------------------------
def frozen(rank: int, ranks: int, victim: int, folder: str) -> Any:
    """The victim stops itself; the last of the others wakes it when both have failed twice."""
    channel = channel_of(rank, ranks, LIMIT)
    a_save(channel)
    dist.barrier()
    if rank == victim:
        Path(folder, "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return [said(channel), said(channel), said(channel, b"awake")]
    lost = [said(channel), said(channel)]
    with contextlib.suppress(FileExistsError):
        Path(folder, "done").mkdir(exist_ok=False)
        return [*lost, said(channel, b"awake")]
    os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
    return [*lost, said(channel, b"awake")]


@pytest.mark.parametrize(("victim", "store"), [(0, "file"), (0, "tcp"), (1, "tcp")])
def test_a_frozen_rank_is_named_after_the_limit_and_joins_when_it_thaws(
    victim: int, store: str, tmp_path: Path
) -> None:
    found = results(3, frozen, victim, str(tmp_path), store=store, limit=40)
    for rank, (first, second, third) in enumerate(found):
        assert third == b"awake,awake,awake"
        for save in (first, second):
            assert isinstance(save[0], tuple), f"rank {rank}: {save}"
        if rank != victim:
            assert first[0] == second[0] == (victim,)
            if (victim, store) == (0, "tcp"):
                assert "key-value store" in first[1]
            else:
                assert f"rank {victim} (" in first[1]
                assert "no sign of life for" in first[1]
                assert "'commit'" in first[1], "what it did last"


def thaws_too_late(rank: int, ranks: int) -> Any:
    channel = channel_of(rank, ranks, 0.5)
    store = shared()
    a_save(channel)
    if rank == 1:
        store.wait(["many"])
        return said(channel)
    for _ in range(12):
        with contextlib.suppress(RankLost):
            a_save(channel)
    if rank == 0:
        store.set("many", "1")
    return None


def test_a_rank_that_missed_many_saves_is_told_that_the_others_have_gone_on() -> None:
    ranks, text = results(3, thaws_too_late, limit=60)[1]
    assert ranks == (0,)
    assert "has gone on" in text


def storm(rank: int, ranks: int, victim: int, after: float) -> None:
    channel = channel_of(rank, ranks)
    a_save(channel)
    if rank == victim:
        threading.Timer(after, die).start()
    while True:
        a_save(channel)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_whenever_a_rank_is_killed_the_others_end_and_name_it(victim: int) -> None:
    chance = random.Random(victim)
    for _ in range(3):
        outcomes = world(4, storm, victim, chance.uniform(0, 0.3), store="file", limit=40)
        for rank in {0, 1, 2, 3} - {victim}:
            error = outcomes[rank].exception
            assert isinstance(error, RankLost), outcomes[rank]
            assert error.ranks == (victim,)
