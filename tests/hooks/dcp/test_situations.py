"""What DCP's callers do besides: planners of their own, caches, groups, other ways to save, and what goes wrong."""

from __future__ import annotations

import dataclasses
import io
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
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


def beside_one_another(rank: int, ranks: int, path: str) -> None:
    chooser = random.Random(rank)
    for step in range(12):
        time.sleep(chooser.random() / 50)
        save({"w": whole((4,), step), "rank": rank}, storage_writer=Writer(path, step=step))
        time.sleep(chooser.random() / 50)


def test_b30_ranks_that_come_late_are_waited_for(tmp_path: Path) -> None:
    results(4, beside_one_another, str(tmp_path / "store"))
    assert steps(tmp_path / "store") == list(range(12))[::-1]
    with tierload.open(tmp_path / "store") as store:
        assert store.verify(full=True).ok
        assert [store.load(rank=rank, keys="rank") for rank in range(4)] == [{"rank": rank} for rank in range(4)]


# Strictness


@dataclasses.dataclass
class Config:
    width: int


def strictly(rank: int, ranks: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    save({"model": {"a": whole((2, 4)), "b": whole((3,), 1)}, "n": 1}, storage_writer=Writer(path, step=1))

    def loading(target: dict[str, Any], **options: Any) -> Any:
        return raised(lambda: load(target, storage_reader=Reader(path), **options))

    zeros = {"a": torch.zeros(2, 4), "b": torch.zeros(3)}
    found["missing"] = loading({"model": zeros | {"c": torch.zeros(1)}})
    found["renamed"] = loading({"net": zeros})
    found["shape"] = loading({"model": {"a": torch.zeros(2, 4), "b": torch.zeros(1, 3)}})
    found["broadcastable"] = loading({"model": {"a": torch.zeros(1, 4)}})
    found["dtype"] = loading({"model": {"a": torch.zeros(2, 4), "b": torch.zeros(3).double()}})
    found["kind"] = loading({"n": torch.zeros(1)})
    found["untouched"] = not any(one.any() for one in zeros.values())
    partial = {"model": zeros | {"c": torch.ones(1)}}
    load(partial, storage_reader=Reader(path), planner=DefaultLoadPlanner(allow_partial_load=True))
    found["partial"] = torch.equal(partial["model"]["b"], whole((3,), 1)) and partial["model"]["c"].item() == 1
    save({"n": 2}, storage_writer=Writer(path, step=2))
    found["commits"] = raised(lambda: load({"n": 0}, storage_reader=Reader(path, step=1 + rank)))
    found["no step"] = raised(lambda: load({"n": 0}, storage_reader=Reader(path, step=9)))
    found["no store"] = raised(lambda: load({"n": 0}, storage_reader=Reader(path + "-none")))
    return found


def test_strictness(tmp_path: Path) -> None:
    for found in results(2, strictly, str(tmp_path / "store")):
        told = {name: text for name, text in found.items() if isinstance(text, dict)}
        for name, words in {
            "missing": "model.c",
            "renamed": "net.a",
            "shape": "for model.b",
            "broadcastable": "for model.a",
            "dtype": "KeyMismatch: nothing was read: 'model/b' is torch.float64",
            "no step": "step 9",
            "no store": "holds no tierload store",
        }.items():
            assert set(told[name]) == {0, 1}, name
            assert all(words in text for text in told[name].values()), (name, told[name])
        assert "RanksDisagree" in told["commits"][0]
        assert not told["kind"]  # DCP puts in the place of a tensor what is no tensor
        assert found["untouched"]
        assert found["partial"]


# What goes wrong


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == 1:
            raise ValueError("no data for you")
        return super().resolve_data(write_item)


def failing(rank: int, ranks: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    began = time.monotonic()
    save({"w": whole((4,))}, storage_writer=Writer(path, step=1))
    found["resolve"] = raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(path, step=2), planner=Failing()))
    strange = {"w": whole((4,)), "x": Config(3) if rank else 3, "f": open if rank else 1}
    found["value"] = raised(lambda: save(strange, storage_writer=Writer(path, step=3)))
    found["keys"] = raised(lambda: save({f"w{rank}": whole((4,))}, storage_writer=Writer(path, step=4)))
    found["paths"] = raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(f"{path}-{rank}", step=5)))
    found["steps"] = raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(path, step=6 + rank)))
    save({"w": whole((4,), 9)}, storage_writer=Writer(path, step=10))
    found["seconds"] = time.monotonic() - began
    return found


def test_what_goes_wrong_on_one_rank_is_told_by_all_at_once(tmp_path: Path) -> None:
    for found in results(3, failing, str(tmp_path / "store"), limit=100):
        assert found.pop("seconds") < tierload.Settings().rank_timeout_seconds / 4
        for name, (rank, words) in {
            "resolve": (1, "no data for you"),
            "value": (1, "state['f']"),
            "keys": (0, "'w1'"),
            "paths": (0, "different directories"),
            "steps": (0, "rank 1 saves with step 7, and rank 0 with 6"),
        }.items():
            assert set(found[name]) == {0, 1, 2}, name
            assert words in found[name][rank], (name, found[name])
        assert "rank 1" in found["resolve"][2]
    assert steps(tmp_path / "store") == [10, 1]
    assert not any(path.name.startswith("store-") for path in tmp_path.iterdir())


def other_planner(rank: int, ranks: int, path: str) -> dict[int, str]:
    class Bare(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            del self.state_dict
            return new_plan

    return raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(path), planner=Bare()))


def test_a_planner_without_its_state_is_refused_by_name(tmp_path: Path) -> None:
    (told,) = results(1, other_planner, str(tmp_path / "store"))
    assert "Bare has no state_dict" in told[0]


# Values


def with_values(rank: int, ranks: int, path: str) -> Any:
    state: dict[str, Any] = {
        "own": {"rng": torch.full((5,), rank, dtype=torch.uint8), "position": rank * 10},
        "config": Config(7),
        "tuple": (1, torch.ones(2)),
        "array": torch.arange(3000).numpy(),
        "list": [1, (2, 3), [b"x" * 4000]],
        "blob": b"y" * 9000,
        "sparse": torch.eye(3).to_sparse(),
        "text": "é",
        "none": None,
    }
    save(state, storage_writer=Writer(path))
    target = dict.fromkeys(state) | {"own": {"rng": torch.zeros(5, dtype=torch.uint8), "position": None}}
    load(target, storage_reader=Reader(path, types=[Config]))
    whole_dict = _load_state_dict_from_keys(storage_reader=Reader(path, types=[Config]))
    return [
        found["config"] == Config(7)
        and found["tuple"][0] == 1
        and torch.equal(found["tuple"][1], torch.ones(2))
        and (found["array"] == state["array"]).all()
        and (found["list"], found["blob"], found["text"], found["none"]) == (state["list"], state["blob"], "é", None)
        and torch.equal(found["sparse"].to_dense(), torch.eye(3))
        and torch.equal(found["own"]["rng"], state["own"]["rng"])
        and found["own"]["position"] == rank * 10
        for found in (target, whole_dict)
    ]


def test_values_of_all_kinds_and_of_each_rank(tmp_path: Path) -> None:
    assert results(2, with_values, str(tmp_path / "store")) == [[True, True]] * 2


def in_stages(rank: int, ranks: int, path: str) -> Any:
    layers = {f"layer{2 * rank + number}": whole((3 + rank, 4), 10 * rank + number) for number in range(2)}
    state = {"stage": layers, "step": 7}
    told = raised(lambda: save(state, storage_writer=Writer(path)))
    save(state, storage_writer=Writer(path, settings=tierload.Settings(per_rank=("stage",))))
    target = {"stage": {name: torch.zeros_like(tensor) for name, tensor in layers.items()}, "step": 0}
    load(target, storage_reader=Reader(path))
    same = all(torch.equal(target["stage"][name], tensor) for name, tensor in layers.items())
    return "RanksDisagree" in told[0], same, target["step"]


def test_stages_with_keys_of_their_own_are_told_to_be_declared_and_then_kept_for_each_rank(tmp_path: Path) -> None:
    assert results(2, in_stages, str(tmp_path / "store")) == [(True, True, 7)] * 2


def with_sharded_tensors(rank: int, ranks: int, path: str) -> Any:
    whole_one, rows = whole((5, 3)), [(0, 3), (3, 2)][rank]
    mine = whole_one[rows[0] : rows[0] + rows[1]].clone()
    local = LocalShard.from_tensor_and_offsets(mine, [rows[0], 0], rank)
    save({"w": init_from_local_shards([local], 5, 3)}, storage_writer=Writer(path, step=1))
    target = LocalShard.from_tensor_and_offsets(torch.zeros_like(mine), [rows[0], 0], rank)
    load({"w": init_from_local_shards([target], 5, 3)}, storage_reader=Reader(path))
    odd = LocalShard.from_tensor_and_offsets(whole((1 if rank else 4, 3)), [4 if rank else 0, 0], rank)
    told = raised(lambda: save({"w": init_from_local_shards([odd], 5, 3)}, storage_writer=Writer(path, step=2)))
    return torch.equal(target.tensor, mine), told


def test_sharded_tensors_of_equal_parts(tmp_path: Path) -> None:
    for same, told in results(2, with_sharded_tensors, str(tmp_path / "store")):
        assert same
        assert "'w' is a ShardedTensor whose shards are not one a rank" in told[0]
    found: Any = tierload.load(tmp_path / "store")
    assert torch.equal(found["w"], whole((5, 3)))


def test_what_is_tied_is_stored_once(tmp_path: Path) -> None:
    table = torch.randn(600, 100)
    save({"embed": table, "head": table, "turned": table.t()}, storage_writer=Writer(tmp_path / "store"))
    with tierload.open(tmp_path / "store") as store:
        assert store.stored_bytes() <= table.nbytes + 4096
    target = {name: torch.zeros_like(table) for name in ("embed", "head")} | {"turned": torch.zeros(100, 600)}
    load(target, storage_reader=Reader(tmp_path / "store"))
    assert torch.equal(target["head"], table)
    assert torch.equal(target["turned"], table.t())


def test_only_pages_that_are_touched_are_read(tmp_path: Path) -> None:
    """A damaged page does not keep others from being loaded, and is named by who needs it."""
    state = {"a": torch.randn(1 << 16), "b": torch.randn(1 << 16)}
    settings = tierload.Settings(compression="off", page_bytes=1 << 16, pack_below_bytes=4096)
    save(state, storage_writer=Writer(tmp_path / "store", settings=settings))
    (segment,) = (tmp_path / "store" / "seg").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.find(state["b"].numpy().tobytes()[:64])] ^= 1
    segment.write_bytes(data)
    target = load({"a": torch.zeros(1 << 16)}, storage_reader=Reader(tmp_path / "store"))
    assert torch.equal(target["a"], state["a"])
    told = raised(lambda: load({"b": torch.zeros(1 << 16)}, storage_reader=Reader(tmp_path / "store")))
    assert "CorruptPage" in told[0]
    assert "key 'b'" in told[0]
