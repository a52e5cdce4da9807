"""Models and optimizers that ranks train together, saved and loaded by DCP with the state dicts that torch makes."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import tierload
from tests.hooks.dcp.states import load, raised, save
from tests.ranks.training import Run
from tests.ranks.world import results
from tierload.hooks.dcp import Reader, Writer

WAYS: list[tuple[int, ...]] = [(1,), (2,), (1, 2), (4,), (2, 2)]
QUICK = [((2, 2), (2,)), ((1, 2), (1, 2))]


class Whole(Stateful):
    """As torchtitan and the tutorials have it."""

    def __init__(self, run: Run, flat: bool) -> None:
        self.run = run
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.run.model, self.run.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "step": self.run.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.run.model,
            self.run.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )
        self.run.step = state["step"]


def trained(rank: int, ranks: int, way: tuple[int, ...], folder: str) -> Any:
    """Trains and saves in each way; what it had, and what it did after that."""
    run = Run(way)
    run.train(2)
    for flat in (False, True):
        save({"app": Whole(run, flat)}, storage_writer=Writer(f"{folder}/store"), checkpoint_id=f"step-{int(flat)}")
        save({"app": Whole(run, flat)}, storage_writer=FileSystemWriter(f"{folder}/stock-{int(flat)}"))
    tierload.save({"model": run.model, "optimizer": run.optimizer, "step": run.step}, f"{folder}/store", step=2)
    return run.whole(), run.train(3), run.whole()


def resumed(rank: int, ranks: int, way: tuple[int, ...], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for flat in (False, True):
        for kind, reader in {
            "tierload": Reader(f"{folder}/store", step=int(flat)),
            "stock": FileSystemReader(f"{folder}/stock-{int(flat)}"),
        }.items():
            run = Run(way, seed=5)  # other weights, and no moments yet
            load({"app": Whole(run, flat)}, storage_reader=reader)
            found[f"{kind}, {'flat' if flat else 'nested'}"] = run.whole(), run.train(3), run.whole()
    # What tierload.save has saved, by DCP; and what DCP has saved, into the model by tierload.load.
    run = Run(way, seed=5)
    state = load(Whole(run, False).state_dict(), storage_reader=Reader(f"{folder}/store", step=2))
    Whole(run, False).load_state_dict(state)
    found["saved by tierload.save"] = run.whole(), run.train(3), run.whole()
    run = Run(way, seed=5)
    tierload.load(f"{folder}/store", step=0, into={"app": {"model": run.model}}, keys="app/model")
    found["loaded by tierload.load"] = {name: run.whole()[name] for name, _ in run.model.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("before", "way"),
    [*QUICK, *(pytest.param(*both, marks=pytest.mark.slow) for both in product(WAYS, WAYS) if both not in QUICK)],
    ids=str,
)
def test_training_goes_on_where_it_was(tmp_path: Path, before: tuple[int, ...], way: tuple[int, ...]) -> None:
    held, after, end = results(prod(before), trained, before, str(tmp_path))[0]
    for found in results(prod(way), resumed, way, str(tmp_path), limit=120):
        weights = found.pop("loaded by tierload.load")
        assert weights
        assert all(torch.equal(tensor, held[name]) for name, tensor in weights.items())
        for name, (loaded, losses, final) in found.items():
            assert loaded.keys() == held.keys(), name
            assert all(torch.equal(loaded[key], held[key]) for key in held), name
            assert losses == pytest.approx(after, rel=1e-5), name  # other ranks add up in another order
            if way == before:
                assert losses == after, name
                assert all(torch.equal(final[key], end[key]) for key in end), name


# One process: optimizers as they are found in the field


class Net(torch.nn.Module):
    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        for name in ("second", "first") if swapped else ("first", "second"):
            setattr(self, name, torch.nn.Linear(4, 4))
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.frozen(self.second(self.first(x).relu()))
        return made


def an_optimizer(net: Net, *, swapped: bool = False) -> torch.optim.Optimizer:
    groups = [{"params": net.first.parameters(), "lr": 1e-2}, {"params": net.second.parameters(), "lr": 1e-3}]
    rest = {"params": [*net.frozen.parameters(), *net.unused.parameters()], "lr": 1e-4}
    return torch.optim.AdamW([*(reversed(groups) if swapped else groups), rest])


def trained_net() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    optimizer = an_optimizer(net)
    for _ in range(3):
        net(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def moments(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return {
        f"{names[parameter]}.{kind}": value
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
    }


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_moments_go_by_name_when_layers_and_groups_have_changed_places(
    tmp_path: Path, flat: bool, swapped: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, optimizer = trained_net()
    model, moments_of = get_state_dict(net, optimizer, options=options)
    save({"model": model, "optimizer": moments_of}, storage_writer=Writer(tmp_path / "store"))
    other = Net(swapped=swapped)
    fresh = an_optimizer(other, swapped=swapped)
    model, moments_of = get_state_dict(other, fresh, options=options)
    state = {"model": model, "optimizer": moments_of}
    # torch makes states for all parameters of a fresh optimizer, also for those that never had a gradient.
    told = raised(lambda: load(state, storage_reader=Reader(tmp_path / "store")))
    assert "optimizer.state.unused.weight" in told[0]
    load(state, storage_reader=Reader(tmp_path / "store"), planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    right, found = moments(net, optimizer), moments(other, fresh)
    assert {name.partition(".")[0] for name in right} == {"first", "second"}
    assert all(torch.equal(found[name], value) for name, value in right.items())
    others = {name: value for name, value in found.items() if name not in right and not name.endswith("step")}
    assert not any(value.any() for value in others.values())
    assert [group["lr"] for group in fresh.param_groups] == ([1e-3, 1e-2, 1e-4] if swapped else [1e-2, 1e-3, 1e-4])
