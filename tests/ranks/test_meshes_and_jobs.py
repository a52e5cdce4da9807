"""Ranks outside a mesh, states of other dtypes than what is loaded into, and stores that one rank opened before all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import tierload
from tests.ranks.jobs import spread, whole
from tests.ranks.training import Run, full
from tests.ranks.world import results
from tierload import Settings

SETTINGS = Settings(page_bytes=4096, pack_below_bytes=1024, threads=1, rank_timeout_seconds=20)


def of_some_ranks(seed: int) -> dict[str, Any]:
    """Tensors over meshes that rank 0, or another rank, is not in."""

    def over(ranks: list[int], placement: Placement) -> DTensor:
        return distribute_tensor(whole((50, 40), seed), DeviceMesh("cpu", ranks), [placement], src_data_rank=None)

    return {"cut": over([0, 2], Shard(0)), "copied": over([1, 2], Replicate()), "plain": whole((64, 100), seed)}


def saved_by_some(rank: int, ranks: int, path: str) -> None:
    right, into = of_some_ranks(0), of_some_ranks(7)
    tierload.save(right, path, settings=SETTINGS)
    tierload.load(path, into=into)
    assert all(torch.equal(into[key].to_local(), right[key].to_local()) for key in ("cut", "copied"))
    assert torch.equal(into["plain"], right["plain"])
    loaded: Any = tierload.load(path)
    assert all(torch.equal(loaded[key], whole((50, 40))) for key in ("cut", "copied"))


def test_ranks_outside_a_mesh_take_part_and_hold_nothing(tmp_path: Path) -> None:
    results(3, saved_by_some, str(tmp_path / "store"))
    with tierload.open(tmp_path / "store") as store:
        assert store.verify(full=True).ok


def moments_in_half(rank: int, ranks: int, path: str) -> None:
    run, other = Run((ranks,)), Run((ranks,), seed=5)
    run.train(1)
    other.train(1)
    for state in run.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    tierload.save(run.state, path, settings=SETTINGS)
    tierload.load(path, into=other.state)
    right, got = run.whole(), other.whole()
    assert all(torch.equal(got[name], right[name]) and got[name].dtype is right[name].dtype for name in right)
    kinds = {type(state["exp_avg"]) for state in other.optimizer.state.values()}
    assert kinds == {DTensor}


def test_spread_optimizer_states_keep_the_dtype_that_they_were_saved_with(tmp_path: Path) -> None:
    results(2, moments_in_half, str(tmp_path / "store"))


def one_and_then_all(rank: int, ranks: int, path: str) -> None:
    if rank == 0:
        tierload.save({"w": whole((6, 4))}, path, settings=Settings(ranks="one"))
    dist.barrier()
    state = {"w": spread(whole((6, 4), 9), (ranks,), [Shard(0)])}
    tierload.load(path, into=state)
    dist.barrier()
    tierload.save(state, path, settings=SETTINGS)
    again = {"w": spread(whole((6, 4), 9), (ranks,), [Shard(1)])}
    tierload.load(path, into=again)
    assert torch.equal(full(again["w"]), whole((6, 4)))


def test_a_store_that_one_rank_saved_into_is_opened_anew_by_all(tmp_path: Path) -> None:
    results(2, one_and_then_all, str(tmp_path / "store"))
    with tierload.open(tmp_path / "store") as store:
        assert [commit.ranks for commit in store.commits()] == [2, 1]


def rolled_back(rank: int, ranks: int, path: str, held: bool) -> None:
    for step in range(3):
        tierload.save({"w": spread(whole((6, 4), step), (ranks,), [Shard(0)])}, path, step=step, settings=SETTINGS)
    if not held:
        tierload.open(path, mode="w").close()
    dist.barrier()
    if rank == 0:
        tierload.rollback(path, to=1)
    else:
        with pytest.raises(tierload.InvalidRequest, match="rank 0"):
            tierload.rollback(path, to=1)
    dist.barrier()
    state = {"w": spread(whole((6, 4), 9), (ranks,), [Shard(0)])}
    tierload.load(path, into=state)
    assert torch.equal(full(state["w"]), whole((6, 4), 1))
    tierload.save(state, path, step=5)


@pytest.mark.parametrize("held", [True, False])
def test_rank_0_rolls_back_without_the_others_and_saving_goes_on(tmp_path: Path, held: bool) -> None:
    results(2, rolled_back, str(tmp_path / "store"), held)
    with tierload.open(tmp_path / "store") as store:
        assert [commit.step for commit in store.commits() if not commit.superseded] == [5, 1, 1, 0]


def looked_before(rank: int, ranks: int, path: str) -> None:
    """All ranks look at the store after a save, and then rank 0 rolls back."""
    store = tierload.open(path, mode="w", settings=SETTINGS)
    for step in range(3):
        store.save({"w": spread(whole((6, 4), step), (ranks,), [Shard(0)])}, step=step)
    assert len(store.commits()) == 3
    dist.barrier()
    if rank == 0:
        store.rollback(0)
        store.collect(keep=1)
    dist.barrier()
    loaded: Any = tierload.load(path)
    assert torch.equal(loaded["w"], whole((6, 4), 0))
    dist.barrier()
    if rank == 0:
        store.tag("then")
        store.rollback(0)
    dist.barrier()
    store.save({"w": spread(whole((6, 4), 3), (ranks,), [Shard(0)])}, step=3)


def test_what_rank_0_does_to_the_store_is_seen_by_ranks_that_have_looked_before(tmp_path: Path) -> None:
    results(3, looked_before, str(tmp_path / "store"))
    with tierload.open(tmp_path / "store") as store:
        assert store.find().step == 3
        assert store.verify(full=True).ok


def of_one_element(rank: int, ranks: int, path: str) -> None:
    def made(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Module()
        model.scale = torch.nn.Parameter(spread(torch.tensor(value), (ranks,), [Replicate()]))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made(2.0)
    model.scale.grad = spread(torch.tensor(1.0), (ranks,), [Replicate()])
    optimizer.step()
    tierload.save({"model": model, "optimizer": optimizer}, path, settings=SETTINGS)
    other, fresh = made(0.0)
    tierload.load(path, into={"model": other, "optimizer": fresh})
    states = optimizer.state[model.scale], fresh.state[other.scale]
    assert [{name: type(value) for name, value in state.items()} for state in states] == [
        {"step": torch.Tensor, "exp_avg": DTensor, "exp_avg_sq": DTensor}
    ] * 2


def test_the_step_of_a_spread_parameter_without_dimensions_stays_plain(tmp_path: Path) -> None:
    results(2, of_one_element, str(tmp_path / "store"))
