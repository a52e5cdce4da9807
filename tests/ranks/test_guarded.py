"""Guarded optimizers whose tensors are spread over ranks: copied late, and still the values of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierload
from tests.ranks.training import Run, full
from tests.ranks.world import results
from tierload.engine import guards

SETTINGS = tierload.Settings(rank_timeout_seconds=30, pack_below_bytes=64)


def late(rank: int, ranks: int, path: str) -> tuple[bool, bool]:
    run = Run((2,))
    tierload.guard(run.optimizer)
    run.train(1)
    memory = guards.guarded_memory(64)
    assert memory is not None
    parts = [value.to_local() for value in run.model.parameters() if value.to_local().nbytes >= 64]
    with torch.no_grad():
        held = memory.holds(*pointers(parts))
    assert held.all(), "every large part of the model may be copied late"
    assert len(memory.changed()) == 0
    pending = tierload.async_save(run.state, path, settings=SETTINGS)
    before = run.whole()
    run.train(2)  # its steps wait for the copy
    pending.durable()
    assert len(memory.changed()) > 0
    other = Run((2,), seed=3)
    tierload.load(path, into=other.state)
    same = all(torch.equal(before[name], value) for name, value in other.whole().items())
    return same, pending.waited > 0


def pointers(parts: list[torch.Tensor]) -> tuple[Any, Any]:
    starts = np.array([part.data_ptr() for part in parts], np.uint64)
    return starts, np.array([part.nbytes for part in parts], np.int64)


def test_parts_of_a_guarded_model_are_those_of_the_call(tmp_path: Path) -> None:
    assert results(2, late, str(tmp_path / "store")) == [(True, True)] * 2


def torn(rank: int, ranks: int, path: str) -> str:
    run = Run((2,))
    tierload.guard(run.optimizer)
    run.train(1)
    memory = guards.guarded_memory
    parameter = next(run.model.parameters())

    def changed_meanwhile(least: int) -> Any:
        found = memory(least)
        with torch.no_grad():
            if rank == 1:
                parameter.mul_(2)  # outside of the step, between the look at the counters and the copy's end
        return found

    guards.guarded_memory = changed_meanwhile
    try:
        pending = tierload.async_save(run.state, path, settings=SETTINGS)
        pending.durable()
    except tierload.TornSave as error:
        return ("own " if "rank" not in str(error)[:6] else "told ") + str(error)
    finally:
        guards.guarded_memory = memory
        full(parameter)
    return ""


def test_a_change_outside_of_the_step_is_found_and_told_to_all(tmp_path: Path) -> None:
    first, second = results(2, torn, str(tmp_path / "store"))
    assert first.startswith("told rank 1")
    assert second.startswith("own ")
    assert "blocks.0.up.weight" in first
    with tierload.open(tmp_path / "store") as store:
        assert store.commits() == []
