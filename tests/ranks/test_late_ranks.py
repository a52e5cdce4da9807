"""Ranks that are late, slow, stuck or never there, in real processes."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks.support import LIMIT, a_save, channel_of, in_threads, joined, said, shared
from tests.ranks.world import results, world
from tierload.errors import RankFailed, StoreIOError
from tierload.ranks import Channel, watch


def never_calls(rank: int, ranks: int) -> Any:
    return said(channel_of(rank, ranks, LIMIT)) if rank != 2 else time.sleep(2 * LIMIT)


def test_a_rank_that_never_calls_is_named_with_what_to_do() -> None:
    for ranks, text in results(4, never_calls)[0:2]:
        assert ranks == (2,)
        assert "rank 2 has not called save" in text
        assert 'Settings(ranks="one")' in text


def only_rank_0_is_missing(rank: int, ranks: int) -> Any:
    return said(channel_of(rank, ranks, LIMIT)) if rank else time.sleep(2 * LIMIT)


def test_rank_0_that_never_calls_is_named() -> None:
    for ranks, text in results(3, only_rank_0_is_missing)[1:]:
        assert ranks == (0,)
        assert "rank 0 has not called save" in text


def slow_but_alive(rank: int, ranks: int, slow: int, way: str) -> Any:
    channel = channel_of(rank, ranks, LIMIT)
    channel.begin()
    if rank == slow:
        began = time.monotonic()
        moved = 0

        def progress() -> int:
            return int(1000 * (time.monotonic() - began))

        with channel.working("writing", progress) if way == "thread" else contextlib.nullcontext():
            while time.monotonic() - began < 3 * LIMIT:
                time.sleep(0.01)
                moved += 1
                if way == "calls":
                    channel.alive(moved)
    return channel.round("prepare", b"%d" % rank, joined)


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("way", ["thread", "calls"])
def test_a_slow_rank_that_works_is_waited_for(slow: int, way: str) -> None:
    assert results(3, slow_but_alive, slow, way) == [b"0,1,2"] * 3


def stuck(rank: int, ranks: int) -> Any:
    channel = channel_of(rank, ranks, LIMIT)
    a_save(channel)
    if rank == 1:
        with channel.working("writing", lambda: 4096):
            time.sleep(3 * LIMIT)
    return said(channel)


def test_a_rank_whose_bytes_do_not_move_is_lost_and_it_is_said_what_it_did() -> None:
    ranks, text = results(3, stuck)[0]
    assert ranks == (1,)
    assert "'writing', 4,096 bytes moved" in text


def random_delays(rank: int, ranks: int, seed: int) -> list[Any]:
    chance = random.Random(f"{seed} {rank}")
    together = random.Random(seed)
    channel = channel_of(rank, ranks)
    found: list[Any] = []
    for save in range(60):
        channel.begin()
        failing = together.choice([None, None, *range(ranks)])
        try:
            for what in ("describe", "prepare", "commit"):
                time.sleep(chance.choice([0, 0, 0.001, 0.01]))
                fails = failing == rank and what == "prepare"
                found.append(channel.round(what, StoreIOError(28, "full", "/x") if fails else b"%d" % save, joined))
        except StoreIOError as error:
            found.append((f"rank {failing} fails", error.errno))
    return found


def test_delays_and_errors_leave_all_ranks_with_the_same_answers() -> None:
    found = results(4, random_delays, 7)
    assert found[1:] == found[:1] * 3
    assert ("rank 2 fails", 28) in found[0]


def test_who_is_waited_for_is_said_once_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(watch, "_WARN_AFTER_S", 0.3)

    def body(channel: Channel) -> None:
        if channel.rank == 1:
            time.sleep(1.5)
        channel.round("describe", b"", joined)

    with caplog.at_level(logging.WARNING, logger="tierload"):
        in_threads(3, body, limit=4)
    assert [record.name for record in caplog.records if "rank 1" in record.getMessage()] == ["tierload"]


def thousand(rank: int, ranks: int) -> int:
    channel = channel_of(rank, ranks)
    store = shared()
    before = store.num_keys()
    for _ in range(1000):
        a_save(channel)
    dist.barrier()
    return store.num_keys() - before


@pytest.mark.slow
def test_a_thousand_saves_of_real_ranks_leave_few_keys() -> None:
    assert max(results(4, thousand)) < 40


def interrupted(rank: int, ranks: int, victim: int) -> Any:
    channel = channel_of(rank, ranks)
    store = shared()
    if rank == victim:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            a_save(channel)
        except KeyboardInterrupt:
            store.set("interrupted", "1")
            return "interrupted"
    store.wait(["interrupted"])
    return said(channel)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_waits_can_be_interrupted_and_the_others_are_told(victim: int) -> None:
    found = results(3, interrupted, victim)
    assert found.pop(victim) == "interrupted"
    for kind, text in found:
        assert kind == "RankFailed"
        assert f"rank {victim} (" in text
        assert "KeyboardInterrupt" in text


def rank_0_leaves(rank: int, ranks: int) -> bytes:
    channel = channel_of(rank, ranks)
    answer = a_save(channel, b"last")
    if rank == 0:
        channel.close()
        os._exit(7)  # and the key-value store with it
    return answer


def test_rank_0_can_end_when_all_have_its_last_answer() -> None:
    for _ in range(3):
        outcomes = world(4, rank_0_leaves)
        assert [outcome.status for outcome in outcomes] == [7, 0, 0, 0]
        assert [outcome.result for outcome in outcomes[1:]] == [b"last,last,last,last"] * 3


def test_a_channel_is_closed_after_a_failure_too() -> None:
    def body(channel: Channel) -> object:
        with contextlib.suppress(ValueError, RankFailed):
            channel.round("x", ValueError() if channel.rank == 1 else b"", joined)
        channel.close()
        return "closed"

    assert in_threads(3, body) == ["closed"] * 3
