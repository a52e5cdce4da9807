"""A storm of changes right after each call: every commit is of one moment, that of its call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tierload
from tests.saves.stamped import Counting, Stamped
from tierload import PendingSave, Settings

SMALL = (1, 3, 40, 300, 1500, 4000)
MIXED = (1, 700, 9000, 60_000, 400_000)
LARGE = (1, 50_000, 600_000, 900_000)

Storm = tuple[Path, list[PendingSave], Stamped]

FINE = Settings(page_bytes=4096, pack_below_bytes=512, compression="off", threads=1)
COARSE = Settings(page_bytes=16384, pack_below_bytes=4096, threads=2)
UNPACKED = Settings(page_bytes=4096, pack_below_bytes=0, compression="fast")
SLOW = Settings(page_bytes=16384, pack_below_bytes=512, compression="off", bandwidth_cap_mbps=80)


def queued(**more: Any) -> Settings:
    return Settings(page_bytes=4096, pack_below_bytes=512, max_in_flight=3, on_busy="queue", **more)


def saved(pending: list[PendingSave]) -> list[int]:
    """The steps that were saved, once all of them are durable."""
    steps = []
    for save in pending:
        if not save.skipped:
            assert save.durable().step == save.step
            steps.append(save.step)
    return steps


def check(path: Path, pending: list[PendingSave], truth: Stamped | Counting) -> int:
    """Every commit is of its step throughout, and there is one for every save that was not skipped."""
    steps = saved(pending)
    with tierload.open(path) as reader:
        commits = reader.commits()
        assert sorted(commit.step for commit in commits) == steps
        for commit in commits:
            truth.check(reader.load(commit=commit), commit.step)
    return len(steps)


def storm(path: Path, settings: Settings, rounds: int, sizes: tuple[int, ...] = SMALL, count: int = 200) -> Storm:
    stamped = Stamped(sizes, count)
    pending = []
    for _ in range(rounds):
        stamped.add()
        pending.append(tierload.async_save(stamped.state, path, step=stamped.step, settings=settings))
        stamped.add()
    return path, pending, stamped


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [(FINE, 90), (COARSE, 90), (UNPACKED, 60), (SLOW, 40)],
    ids=["fine", "coarse", "all", "slow"],
)
def test_unguarded_states_are_of_the_moment_of_the_call(store: Path, settings: Settings, rounds: int) -> None:
    assert check(*storm(store, settings, rounds)) == rounds


@pytest.mark.parametrize("threads", [1, 0])
def test_saves_in_a_queue_are_each_of_their_own_moment(store: Path, threads: int) -> None:
    assert check(*storm(store, queued(threads=threads, bandwidth_cap_mbps=60), 60)) == 60


def test_what_a_busy_store_does_not_skip_is_of_its_moment(store: Path) -> None:
    settings = Settings(page_bytes=4096, pack_below_bytes=512, on_busy="skip", max_in_flight=2, bandwidth_cap_mbps=60)
    path, pending, stamped = storm(store, settings, 100)
    skipped = sum(save.skipped for save in pending)
    assert check(path, pending, stamped) == 100 - skipped
    assert tierload.open(store, mode="w").skipped == skipped


def test_tensors_of_some_mib(store: Path) -> None:
    assert check(*storm(store, Settings(), 12, MIXED)) == 12


def counting(path: Path, counter: Counting, settings: Settings, rounds: int, *, elsewhere: bool = False) -> int:
    guard = tierload.guard(counter.optimizer, steps_elsewhere=elsewhere)
    assert bool(guard.reason) == elsewhere
    pending = []
    counter.step()
    for _ in range(rounds):
        pending.append(tierload.async_save(counter.state, path, step=counter.steps, settings=settings))
        counter.step()
    return check(path, pending, counter)


@pytest.mark.parametrize("way", ["foreach", "fused", "neither"])
@pytest.mark.parametrize("settings", [FINE, COARSE], ids=["fine", "coarse"])
def test_guarded_optimizers_change_nothing_that_is_being_copied(store: Path, way: str, settings: Settings) -> None:
    counter = Counting(SMALL, foreach=way == "foreach", fused=way == "fused")
    assert counting(store, counter, settings, 60) == 60


def test_a_slow_writer_holds_nothing_up(store: Path) -> None:
    assert counting(store, Counting(SMALL, fused=True), SLOW, 40) == 40


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_guarded_saves_in_a_queue(store: Path, way: str) -> None:
    counter = Counting(SMALL, foreach=way == "foreach", fused=way == "fused")
    assert counting(store, counter, queued(bandwidth_cap_mbps=60), 60) == 60


def test_an_optimizer_that_steps_elsewhere_is_copied_at_the_call(store: Path) -> None:
    assert counting(store, Counting(SMALL, fused=True), FINE, 40, elsewhere=True) == 40


def test_guarded_tensors_of_some_mib(store: Path) -> None:
    assert counting(store, Counting(MIXED, fused=True), Settings(compression="off"), 12) == 12


WAVES = Settings(host_budget_bytes=64 << 20, compression="off", bandwidth_cap_mbps=250)


def test_a_state_that_is_larger_than_the_budget(store: Path) -> None:
    path, pending, stamped = storm(store, WAVES, 3, LARGE, count=60)
    assert pending[0].result().raw_bytes > 100 << 20
    assert check(path, pending, stamped) == 3


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_a_guarded_state_that_is_larger_than_the_budget(store: Path, way: str) -> None:
    counter = Counting(LARGE, count=50, foreach=way == "foreach", fused=way == "fused")
    assert counting(store, counter, WAVES, 3) == 3
