"""What ranks save of a model in wrappers, a bare model loads alone; and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tierload
from tests.cases.stores import let_go
from tests.ranks.training import BATCH, WIDTH, Model, full
from tests.ranks.world import results


def model_of(way: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: torch.nn.Module = Model()
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fully sharded compiled layers":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        blocks = model.blocks
        assert isinstance(blocks, torch.nn.ModuleList)
        for number, block in enumerate(blocks):
            blocks[number] = torch.compile(checkpoint_wrapper(block), backend="eager")
            fully_shard(blocks[number], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every parameter and moment, whole, in the order of the model."""
    every = [[p, *optimizer.state[p].values()] for p in model.parameters()]
    return [full(value) for each in every for value in each]


def saved_by_ranks(rank: int, ranks: int, way: str, path: str) -> tuple[list[torch.Tensor], Any]:
    model, optimizer = model_of(way, seed=0)
    tierload.guard(optimizer)
    step(model, optimizer)
    pending = tierload.async_save({"model": model, "optimizer": optimizer}, path, step=1)
    before = values(model, optimizer)
    step(model, optimizer)  # while it is being saved
    return before, pending.result().notes


def loaded_by_ranks(rank: int, ranks: int, way: str, path: str) -> tuple[list[torch.Tensor], Any]:
    model, optimizer = model_of(way, seed=7)
    report: Any = tierload.load(path, into={"model": model, "optimizer": optimizer})
    return values(model, optimizer), report.notes


@pytest.mark.parametrize("way", ["ddp", "fully sharded compiled layers"])
def test_ranks_in_wrappers_and_a_bare_model_alone(tmp_path: Path, way: str) -> None:
    element = "`module.`" if way == "ddp" else "`_orig_mod.`"
    path = str(tmp_path / "by-ranks")
    saved = results(2, saved_by_ranks, way, path)
    for _, notes in saved:
        assert [note for note in notes if element in note], "it is told"
    before = saved[0][0]
    model, optimizer = model_of("bare", seed=5)
    report: Any = tierload.load(path, into={"model": model, "optimizer": optimizer})
    assert not report.notes
    assert {"model/blocks.0.up.weight", "model/head.bias"} <= set(report.loaded)
    found = values(model, optimizer)
    assert len(found) == len(before)
    assert all(torch.equal(got, want) for got, want in zip(found, before, strict=True))

    step(model, optimizer)
    alone = tmp_path / "alone"
    tierload.save({"model": model, "optimizer": optimizer}, alone)
    let_go(alone)
    want = values(model, optimizer)
    for got, notes in results(2, loaded_by_ranks, way, str(alone)):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        assert [note for note in notes if element in note]


def saved_by_fsdp1(rank: int, ranks: int, path: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    step(model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(model, optimizer, options=options)  # what it keeps are pieces of flat vectors
    tierload.save({"model": model, "optimizer": whole}, path)
    state: Any = tierload.load(path)
    fresh = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
    tierload.load(path, into={"model": fresh}, keys=["model"])
    assert all(torch.equal(got, state["model"][name]) for name, got in fresh.state_dict().items())
    names = [name for name, _ in Model().named_parameters()]
    parts = ("exp_avg", "exp_avg_sq")
    return [value for n in names for value in (state["model"][n], *(whole["state"][n][part] for part in parts))]


@pytest.mark.filterwarnings("ignore")
def test_a_model_and_moments_that_fsdp1_gathered_in_a_bare_one(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    want = results(2, saved_by_fsdp1, path)[0]
    model, optimizer = model_of("bare", seed=5)
    tierload.load(path, into={"model": model, "optimizer": optimizer})
    states = [[p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]] for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip([one for each in states for one in each], want, strict=True))
