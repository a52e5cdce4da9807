"""Ranks of a real job save together and load again: what each of them gets is what it had."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.ranks.jobs import COLUMNS, ROWS, Replicate, Shard, state_of, whole
from tests.ranks.world import results

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "grid": ((2, 2), [Shard(0), Shard(1)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "copies": ((4,), [Replicate()]),
}


def save(rank: int, ranks: int, path: str, layout: str, *, late: bool = False) -> str:
    state = state_of(rank, *LAYOUTS[layout])
    if late:
        return tierload.async_save(state, path, step=12).durable().id
    return tierload.save(state, path, step=12).commit.id


def load_alike(rank: int, ranks: int, path: str, layout: str) -> None:
    state = state_of(rank, *LAYOUTS[layout], seed=99)
    state["loader"] = {}
    state["rng"].manual_seed(77)
    state["mine"].zero_()
    tierload.load(path, into=state)
    right = state_of(rank, *LAYOUTS[layout])
    assert torch.equal(state["w"].to_local(), right["w"].to_local())
    assert torch.equal(state["same"].to_local(), right["same"].to_local())
    assert torch.equal(state["plain"], right["plain"])
    assert torch.equal(state["mine"], right["mine"])
    assert state["loader"] == {"position": rank * 100, "epoch": 3}
    assert torch.equal(state["rng"].get_state(), torch.Generator().manual_seed(rank).get_state())
    assert state["python"].getstate() == random.Random(rank).getstate()


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["now", "late"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_gets_back_what_it_had(tmp_path: Path, layout: str, late: bool) -> None:
    path = str(tmp_path / "store")
    ids = results(4, saved_and_loaded, path, layout, late)
    assert len(set(ids)) == 1
    with tierload.open(path) as store:
        head = store.head()
        assert head is not None
        assert (head.id, head.step, head.ranks) == (ids[0], 12, 4)
        found: Any = store.load()
        assert torch.equal(found["w"], whole((ROWS, COLUMNS)))
        assert torch.equal(found["same"], whole((7,), 1))
        assert found["step"] == 12
        assert [store.load(rank=rank, keys="loader")["loader"]["position"] for rank in range(4)] == [0, 100, 200, 300]
        assert store.verify(full=True).ok


def saved_and_loaded(rank: int, ranks: int, path: str, layout: str, late: bool) -> str:
    id = save(rank, ranks, path, layout, late=late)
    load_alike(rank, ranks, path, layout)
    return id
