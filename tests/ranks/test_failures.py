"""A rank of a job fails in a save: every rank hears what came first, nothing half is committed, and it goes on."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierload
from tests.ranks.jobs import Shard, spread, whole
from tests.ranks.world import World, results, world
from tierload import _native
from tierload.engine import Store
from tierload.engine.together import _Together

SETTINGS = tierload.Settings(rank_timeout_seconds=20, compression="off")
QUICK = tierload.Settings(rank_timeout_seconds=2.5, compression="off")


def state_of(step: int) -> dict[str, Any]:
    ranks = dist.get_world_size()
    return {"w": spread(whole((32, 4096), step), (ranks,), [Shard(0)]), "rank": dist.get_rank(), "step": step}


def whole_of(path: Path | str, step: int) -> None:
    """The newest commit is that of a step, all of it."""
    with tierload.open(path) as store:
        head = store.head()
        assert head is not None
        assert head.step == step
        found: Any = store.load()
        assert torch.equal(found["w"], whole((32, 4096), step))
        assert store.verify(full=True).ok


def on_disk_of(rank: int, ranks: int, path: str, who: int, code: int, late: bool) -> tuple[str, int | None, str]:
    faults = _native.Faults()
    store = Store(path, mode="w", settings=SETTINGS, _faults=faults)
    store.save(state_of(1), step=1)
    if rank == who:
        faults.arm(1, "fail", code, 10_000, "write")
    try:
        if late:
            store.async_save(state_of(2), step=2).durable()
        else:
            store.save(state_of(2), step=2)
    except tierload.StoreIOError as error:
        told = type(error).__name__, error.errno, str(error)
    faults.disarm()
    if store.poisoned:
        store.reopen()
    store.save(state_of(3), step=3)
    store.close()
    return told


@pytest.mark.parametrize(
    ("who", "code", "late"), [(2, errno.ENOSPC, False), (1, errno.EIO, True), (0, errno.EIO, False)]
)
def test_a_disk_that_fails_for_one_rank_fails_the_save_for_all(tmp_path: Path, who: int, code: int, late: bool) -> None:
    path = str(tmp_path / "store")
    for rank, (kind, number, text) in enumerate(results(3, on_disk_of, path, who, code, late)):
        assert (kind, number) == ("StoreIOError", code)
        assert rank == who or f"rank {who} (" in text, text
    whole_of(path, 3)
    with tierload.open(path) as store:
        assert [commit.step for commit in store.commits()] == [3, 1]


class Mended(Store):
    """A store whose disk works again when it is opened anew."""

    mended = False

    def reopen(self) -> None:
        assert self._faults is not None
        self._faults.disarm()
        self.mended = True
        super().reopen()


def retried(rank: int, ranks: int, path: str) -> bool:
    faults = _native.Faults()
    settings = tierload.Settings(rank_timeout_seconds=20, on_failure="retry")
    store = Mended(path, mode="w", settings=settings, _faults=faults)
    store.save(state_of(1), step=1)
    if rank == 1:
        faults.arm(2, "fail", errno.EIO, 1, "write")
    store.async_save(state_of(2), step=2).durable()
    store.close()
    return store.mended


def test_a_save_is_tried_again_by_all_ranks_together(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert results(3, retried, path) == [True] * 3
    whole_of(path, 2)


def killed_in(rank: int, ranks: int, path: str, who: int, where: str) -> str:
    tierload.save(state_of(1), path, step=1, settings=QUICK)

    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == who:
        setattr(_Together, where, die)
    began = time.monotonic()
    try:
        tierload.save(state_of(2), path, step=2, settings=QUICK)
    except tierload.RankLost as error:
        assert time.monotonic() - began < 15
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("who", "where"),
    [
        (0, "_commit"),
        (2, "_write_shard"),
        *(
            pytest.param(who, where, marks=pytest.mark.slow)
            for who, where in ((0, "_decide"), (0, "_write"), (2, "_describe"), (2, "_write"))
        ),
    ],
)
def test_who_is_killed_is_named_and_the_last_commit_is_whole(tmp_path: Path, who: int, where: str) -> None:
    path = str(tmp_path / "store")
    for rank, outcome in enumerate(world(3, killed_in, path, who, where, store="file")):
        if rank == who:
            assert outcome.status == -signal.SIGKILL
        else:
            assert outcome.exception is None, outcome
            assert f"rank {who}" in outcome.result
    whole_of(path, 1)
    results(2, saved_once, path, 5)  # and two ranks go on
    whole_of(path, 5)
    with tierload.open(path, mode="w") as store:
        store.collect(keep=1)
        assert len(list((Path(path) / "man").iterdir())) == 6  # two shards and a root, each with its mirror


def saved_once(rank: int, ranks: int, path: str, step: int) -> None:
    tierload.save(state_of(step), path, step=step, settings=SETTINGS)


def silent(rank: int, ranks: int, path: str) -> tuple[str, str]:
    tierload.save(state_of(1), path, step=1, settings=QUICK)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    said = []
    for step in (2, 3):
        try:
            tierload.save(state_of(step), path, step=step, settings=QUICK)
            said.append("")
        except tierload.RankLost as error:
            said.append(str(error))
    print("both have failed", flush=True)
    return said[0], said[1]


def test_a_rank_that_stands_still_is_named_and_cannot_disturb_when_it_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    job = World(3, silent, (path,), "tcp")
    end = time.monotonic() + 40
    while not all("both have failed" in job.said(rank) for rank in (0, 1)) and time.monotonic() < end:
        time.sleep(0.05)
    job.signal(2, signal.SIGCONT)
    first, second, frozen = job.outcomes(40)
    for outcome in (first, second):
        assert outcome.exception is None, outcome
        assert "rank 2" in outcome.result[0]
    assert frozen.exception is None, frozen
    assert all(text != "" for text in frozen.result)
    whole_of(path, 1)


def refused(rank: int, ranks: int, path: str) -> tuple[str, Any]:
    try:
        tierload.save(state_of(1), path, step=1, settings=SETTINGS)
    except tierload.StoreBusy as error:
        return str(error), error.holder.get("pid")
    return "", None


def test_a_second_job_is_refused_on_all_ranks_and_told_who_holds_the_store(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with tierload.open(path, mode="w") as store:
        store.save({"w": torch.ones(1)})
        for text, _ in results(3, refused, path):
            assert f"process {os.getpid()}" in text


def taken_over(rank: int, ranks: int, path: str, folder: str) -> str:
    tierload.save(state_of(1), path, step=1, settings=SETTINGS)
    Path(folder, f"saved{rank}").touch()
    while not Path(folder, "taken").exists():
        time.sleep(0.02)
    try:
        tierload.save(state_of(2), path, step=2, settings=SETTINGS)
    except tierload.StoreFenced as error:
        return str(error)
    return ""


def test_a_job_whose_store_was_taken_over_is_fenced_on_all_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    job = World(3, taken_over, (path, str(tmp_path)), "tcp")
    end = time.monotonic() + 40
    while len(list(tmp_path.glob("saved*"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    with tierload.open(path, mode="w", take_over=True) as store:
        (tmp_path / "taken").touch()
        for outcome in job.outcomes(40):
            assert outcome.exception is None, outcome
            assert "took the store over" in outcome.result or "newer epoch" in outcome.result, outcome.result
        store.save({"w": whole((32, 4096), 7)}, step=7)
    whole_of(path, 7)


def training_goes_on(rank: int, ranks: int, path: str) -> int:
    """B36: the group of the training has a limit that a save by far exceeds."""
    slow = tierload.Settings(rank_timeout_seconds=30, compression="off", bandwidth_cap_mbps=0.1)
    group = dist.new_group(timeout=timedelta(seconds=2))
    pending = tierload.async_save(state_of(1), path, step=1, settings=slow)
    steps = 0
    while not pending.done():
        dist.all_reduce(torch.ones(1), group=group)
        steps += 1
        time.sleep(0.02)
        done = torch.tensor(float(pending.done()))
        dist.all_reduce(done, group=group)
        if done > 0:
            break
    pending.durable()
    return steps


def test_no_collective_of_the_training_waits_for_a_save(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert min(results(2, training_goes_on, path)) > 50
    whole_of(path, 1)


def at_random_times(rank: int, ranks: int, path: str) -> None:
    """B30: ranks come at other times, and one writes longer than another."""
    chance = random.Random(rank)
    pending = []
    for step in range(1, 26):
        time.sleep(chance.choice([0, 0.001, 0.02, 0.1]))
        if step % 3:
            pending.append(tierload.async_save(state_of(step), path, step=step, settings=SETTINGS))
        else:
            tierload.save(state_of(step), path, step=step, settings=SETTINGS)
        time.sleep(chance.choice([0, 0.001, 0.02, 0.1]))
    for each in pending:
        each.durable()


@pytest.mark.slow
def test_ranks_that_come_at_random_times_make_one_commit_of_each_save(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    results(4, at_random_times, path)
    with tierload.open(path) as store:
        assert [commit.step for commit in store.commits()] == list(range(25, 0, -1))
    whole_of(path, 25)


def busy(rank: int, ranks: int, path: str) -> list[bool]:
    settings = tierload.Settings(rank_timeout_seconds=20, on_busy="skip", compression="off")
    made = []
    for step in range(1, 13):
        made.append(tierload.async_save(state_of(step), path, step=step, settings=settings))
        time.sleep(0.15 if rank == step % ranks else 0.01)  # each rank is ready at another time
    found = [saved(pending) for pending in made]
    tierload.open(
        path, mode="w"
    ).close()  # as an exit does: the other rank may still have to hear of what this one skips
    return found


def saved(pending: tierload.PendingSave) -> bool:
    try:
        pending.durable()
    except tierload.SaveSkipped:
        return False
    return True


def cancelled(rank: int, ranks: int, path: str) -> list[str]:
    slow = tierload.Settings(rank_timeout_seconds=20, compression="off", bandwidth_cap_mbps=0.2)
    said = []
    for step, who in ((1, 1), (2, 0)):
        pending = tierload.async_save(state_of(step), path, step=step, settings=slow)
        if rank == who:
            pending.cancel()
        try:
            pending.durable()
            said.append("")
        except tierload.SaveCancelled as error:
            said.append(str(error))
    pending = tierload.async_save(state_of(3), path, step=3, settings=SETTINGS)
    pending.durable()
    return said


def test_what_one_rank_cancels_is_cancelled_for_all(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    for said in results(2, cancelled, path):
        assert all(said)
    whole_of(path, 3)


def test_what_one_rank_skips_is_skipped_by_all(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    made = results(2, busy, path)
    assert made[0] == made[1]
    assert not all(made[0])
    with tierload.open(path) as store:
        steps = [step for step, done in zip(range(1, 13), made[0], strict=True) if done]
        assert [commit.step for commit in store.commits()] == steps[::-1]


def untold(rank: int, ranks: int, path: str) -> list[str]:
    """One rank asks its handle, the other does not."""
    faults = _native.Faults()
    store = Store(path, mode="w", settings=SETTINGS, _faults=faults)
    said = []
    if rank == 0:
        faults.arm(1, "fail", errno.ENOSPC, 10_000, "write")
    pending = store.async_save(state_of(1), step=1)
    if rank == 0:
        with pytest.raises(tierload.StoreIOError):
            pending.durable()
    else:
        while not pending.done():
            time.sleep(0.01)
    faults.disarm()
    for step in (2, 3):
        try:
            store.save(state_of(step), step=step)
            said.append("")
        except tierload.TierloadError as error:
            said.append(str(error))
    store.close()
    return said


def test_a_failure_that_one_rank_was_not_told_fails_the_next_save_for_all(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first, second = results(2, untold, path)
    assert first[0] != ""
    assert second[0] != ""
    assert first[1] == second[1] == ""
    whole_of(path, 3)
