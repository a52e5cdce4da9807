"""How else DCP is called: planners of its callers, caches, groups, the background, names of checkpoints."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierload
from tests.hooks.dcp.states import LAYOUTS, differences, empty_of, load, raised, save, state_of
from tests.ranks.jobs import whole
from tests.ranks.world import results
from tierload.hooks.dcp import Reader, Writer

ROWS = LAYOUTS[2]["rows"]


def steps(path: Path | str) -> list[int | None]:
    with tierload.open(path) as store:
        return [commit.step for commit in store.commits()]


# Planners


class Halving(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.half() if isinstance(made, torch.Tensor) and made.dtype is torch.float32 else made


def by_planners(rank: int, ranks: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    state = state_of(ROWS)
    # Plans that are cached arrive as empty ones, and keys may have changed since.
    for step in range(4):
        extra = {"more": whole((4,), step)} if step == 2 else {}
        save(
            state | {"step": torch.tensor(step)} | extra,
            storage_writer=Writer(path, step=step),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
    for step in range(4):
        target = empty_of(ROWS) | {"step": torch.tensor(-1)} | ({"more": torch.zeros(4)} if step == 2 else {})
        load(target, storage_reader=Reader(path, step=step))
        found[f"cached {step}"] = [*differences(target, ROWS), target["step"].item() == step]
    save(state, storage_writer=Writer(path, step=10), planner=Halving())
    found["halved"] = raised(lambda: load(empty_of(ROWS), storage_reader=Reader(path, step=10)))
    target = load(empty_of(ROWS), storage_reader=Reader(path, step=10, cast=True))
    found["cast"] = torch.equal(target["model"]["even"].to_local(), state["model"]["even"].to_local().half().float())
    flat = {"a": state["model"]["even"], "b": 3}
    save(flat, storage_writer=Writer(path, step=11), planner=DefaultSavePlanner(flatten_state_dict=False))
    target = {"a": empty_of(ROWS)["model"]["even"], "b": None}
    # With flatten_sharded_tensors this planner puts values into a copy of the dict, with torch's own storage too.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(target, storage_reader=Reader(path, step=11), planner=planner)
    found["flat"] = torch.equal(target["a"].to_local(), flat["a"].to_local()) and target["b"] == 3
    return found


def test_planners(tmp_path: Path) -> None:
    for found in results(2, by_planners, str(tmp_path / "store")):
        halved = found.pop("halved")
        assert set(halved) == {0, 1}
        assert all("'model/even' is torch.float32 in the target and torch.float16" in text for text in halved.values())
        assert all("'rest/list/#0'" in text and "cast=True" in text for text in halved.values())
        assert found == {f"cached {step}": [True] for step in range(4)} | {"cast": True, "flat": True}


# Other ways to save


def in_other_ways(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    path = f"{folder}/store"
    found: dict[str, Any] = {}
    state = state_of(ROWS)
    writer, reader = Writer(path, step=3), Reader(path)
    future = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{folder}/run/step-1")
    with torch.no_grad():
        state["model"]["even"].to_local().add_(1)
    future.result()
    save(state_of(ROWS, 5), storage_writer=writer, checkpoint_id=f"{folder}/run/step-2/")
    save(state_of(ROWS, 6), storage_writer=writer, use_collectives=False)
    writer.step = 4
    save(state_of(ROWS, 7), storage_writer=writer, checkpoint_id="best")
    for name, seed in (("step-1", 0), ("2", 5), ("step=3.ckpt", 6), ("best", 7)):
        target = load(empty_of(ROWS), storage_reader=reader, checkpoint_id=f"{folder}/run/{name}")
        found[name] = differences(target, ROWS, seed)
    found["newest"] = differences(load(empty_of(ROWS), storage_reader=reader, checkpoint_id=path), ROWS, 7)
    # One rank by itself, into a store of its own; or a group of only it.
    alone = {"w": whole((4,), rank)}
    save(alone, storage_writer=Writer(f"{folder}/alone-{rank}", step=1), no_dist=True)
    group = dist.new_group([1])
    if rank == 1:
        save(alone, storage_writer=Writer(f"{folder}/alone-{rank}", step=2), process_group=group)
    dist.barrier()
    target = load({"w": torch.zeros(4)}, storage_reader=Reader(f"{folder}/alone-{rank}"), no_dist=True)
    found["alone"] = [] if torch.equal(target["w"], alone["w"]) else ["w"]
    return found


def test_other_ways_to_save(tmp_path: Path) -> None:
    for found in results(2, in_other_ways, str(tmp_path)):
        assert not any(found.values()), found
    assert steps(tmp_path / "store") == [4, 3, 2, 1]
    assert (steps(tmp_path / "alone-0"), steps(tmp_path / "alone-1")) == ([1], [2, 1])


def some_ranks(rank: int, ranks: int, path: str) -> dict[int, str]:
    group = dist.new_group([0, 1])
    if rank > 1:
        return {}
    return raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(path), process_group=group))


def test_a_group_of_some_ranks_is_refused(tmp_path: Path) -> None:
    first, second, other = results(3, some_ranks, str(tmp_path / "store"))
    assert not other
    assert first == second
    assert "2 of the job's 3 ranks" in first[0]
    assert not (tmp_path / "store").exists()


def in_a_process(rank: int, ranks: int, path: str) -> list[str]:
    wrong = []
    for seed in range(2):
        save(state_of(ROWS, 10 + seed), storage_writer=Writer(path, step=10 + seed))  # here, before and between
        future = dcp.async_save(
            state_of(ROWS, seed),
            storage_writer=Writer(path, step=seed),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result()
    for step in (0, 1, 10, 11):
        wrong += differences(load(empty_of(ROWS), storage_reader=Reader(path, step=step)), ROWS, step)
    return wrong


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_in_the_background_have_the_values_of_their_calls(tmp_path: Path) -> None:
    """Also where the next one is called before the one before is done: they then have memory of their own."""
    state: dict[str, Any] = {"w": torch.zeros(1 << 18), "in": {"x": torch.zeros(3)}, "step": 0}
    state["tied"] = state["w"]
    pending = []
    for step in range(9):
        for tensor in (state["w"], state["in"]["x"]):
            tensor.fill_(step)
        state["step"] = step
        pending.append(dcp.async_save(state, storage_writer=Writer(tmp_path / "store", step=step)))
        if step % 3 == 2:
            assert all(future.result().storage_data for future in pending)
            pending.clear()
    for step in range(9):
        found: Any = tierload.load(tmp_path / "store", step=step)
        assert (found["w"] == step).all()
        assert (found["in"]["x"] == step).all()
        assert found["step"] == step
        assert found["tied"].data_ptr() == found["w"].data_ptr()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_may_be_resized_between_saves_in_the_background(tmp_path: Path) -> None:
    tensor = torch.zeros(100)
    for step, size in enumerate((100, 5000, 10)):
        tensor.resize_(size).fill_(step)
        dcp.async_save({"w": tensor}, storage_writer=Writer(tmp_path / "store", step=step)).result()
        found: Any = tierload.load(tmp_path / "store")
        assert torch.equal(found["w"], tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_in_the_background_that_fails_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    future: Any = dcp.async_save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path / "file"))
    with pytest.raises(dcp.CheckpointException):
        future.result()
    assert [record.name for record in caplog.records if "a save in the background failed" in record.message] == [
        "tierload"
    ]


@pytest.mark.slow
def test_a_process_that_saves_and_this_one_take_turns(tmp_path: Path) -> None:
    assert results(2, in_a_process, str(tmp_path / "store"), limit=120) == [[], []]


def beside_one_another(rank: int, ranks: int, path: str) -> list[int]:
    """How many keys the job's key-value store has after each save."""
    chooser = random.Random(rank)
    keys = []
    for step in range(12):
        time.sleep(chooser.random() / 50)
        save({"w": whole((4,), step), "rank": rank}, storage_writer=Writer(path, step=step))
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        time.sleep(chooser.random() / 50)
    return keys


def test_b30_ranks_that_come_late_are_waited_for(tmp_path: Path) -> None:
    for keys in results(4, beside_one_another, str(tmp_path / "store")):
        assert keys[-1] - keys[0] <= 11 * 2 * 4, "of a save that is over, next to nothing is left there"
    assert steps(tmp_path / "store") == list(range(12))[::-1]
    with tierload.open(tmp_path / "store") as store:
        assert store.verify(full=True).ok
        assert [store.load(rank=rank, keys="rank") for rank in range(4)] == [{"rank": rank} for rank in range(4)]
