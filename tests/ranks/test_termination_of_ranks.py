"""SIGTERM, Ctrl-C and forks while all ranks are in a save."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import tierload
from tests.ranks.jobs import Shard, spread, whole
from tests.ranks.world import results, world

SLOW = tierload.Settings(rank_timeout_seconds=20, compression="off", bandwidth_cap_mbps=2)


def large(ranks: int) -> dict[str, Any]:
    """A second's worth of writing for each rank."""
    return {"w": spread(whole((500 * ranks, 1000)), (ranks,), [Shard(0)]), "rank": dist.get_rank()}


def terminated(rank: int, ranks: int, path: str) -> None:
    pending = tierload.async_save(large(ranks), path, step=1, settings=SLOW)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGTERM)
    pending.durable()
    time.sleep(20)  # it does not come to that


def test_a_save_in_flight_ends_before_sigterm_ends_the_ranks_and_none_calls_it_failed(tmp_path: Path) -> None:
    for outcome in world(3, terminated, str(tmp_path / "store")):
        assert outcome.status == -signal.SIGTERM
        assert "finishing the save of step 1" in outcome.said
        assert "failed" not in outcome.said
        assert "RankLost" not in outcome.said
    with tierload.open(tmp_path / "store") as store:
        assert [commit.step for commit in store.commits()] == [1]
        assert store.verify(full=True).ok


def interrupted(rank: int, ranks: int, path: str, who: int) -> str:
    tierload.save({"w": torch.ones(2)}, path, step=0, settings=SLOW)
    state = large(ranks)
    dist.barrier()
    if rank == who:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        tierload.save(state, path, step=1)
    except (KeyboardInterrupt, tierload.RankFailed) as error:
        said = f"{type(error).__name__} {error}"
    tierload.save({"w": torch.ones(3)}, path, step=2)
    return said


@pytest.mark.slow
def test_ctrl_c_on_one_rank_fails_the_save_on_all_and_the_next_one_is_made(tmp_path: Path) -> None:
    for who in range(2):
        said = results(2, interrupted, str(tmp_path / str(who)), who)
        assert said[who].startswith("KeyboardInterrupt")
        assert said[1 - who].startswith(f"RankFailed rank {who} (")
        with tierload.open(tmp_path / str(who)) as store:
            assert [commit.step for commit in store.commits()] == [2, 0]


def forked(rank: int, ranks: int, path: str) -> None:
    pending = tierload.async_save(large(ranks), path, step=1, settings=SLOW)
    assert sum(int(batch.sum()) for batch in DataLoader([*range(40)], batch_size=4, num_workers=2)) == 780
    pending.durable()
    child = os.fork()
    if child == 0:
        loaded: Any = tierload.load(path)
        os._exit(0 if torch.equal(loaded["w"], whole((500 * ranks, 1000))) else 1)
    tierload.save({"w": torch.ones(3)}, path, step=2)
    assert os.waitpid(child, 0)[1] == 0


def test_children_that_are_forked_beside_a_save_do_not_disturb_it(tmp_path: Path) -> None:
    results(2, forked, str(tmp_path / "store"))
    with tierload.open(tmp_path / "store") as store:
        assert [commit.step for commit in store.commits()] == [2, 1]
        assert store.verify(full=True).ok
