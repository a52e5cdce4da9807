"""What stands in a state besides tensors, and tensors of other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierload
from tests.hooks.dcp.states import Config, load, raised, save
from tests.ranks.jobs import whole
from tests.ranks.world import results
from tierload.hooks.dcp import Reader, Writer


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
