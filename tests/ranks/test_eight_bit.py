"""B90 among ranks: 8-bit states are of a rank's own part. They come back to it, bit for bit, and to nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierload
from tests.cases.stores import let_go
from tests.ranks.world import results
from tierload import KeyMismatch


class EightBit(torch.optim.Optimizer):
    """uint8 moments of the local part, a scale for each 16 of them, and a table that all share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.table = torch.linspace(-1, 1, 256)

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            local = p.to_local() if hasattr(p, "to_local") else p
            self.state[p] = {
                "state1": torch.randint(0, 256, local.shape, dtype=torch.uint8),
                "absmax1": torch.rand(-(-local.numel() // 16)),
                "qmap1": self.table,
                "step": 3,
            }


def made(ranks: int = 1, sharded: bool = True) -> tuple[torch.nn.Module, EightBit]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 12))
    if ranks > 1 and sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model, EightBit(model.parameters())


def states(optimizer: EightBit) -> list[dict[str, Any]]:
    return [dict(state) for state in optimizer.state.values()]


def saved(rank: int, ranks: int, path: str) -> list[dict[str, Any]]:
    model, optimizer = made(ranks)
    torch.manual_seed(rank)
    optimizer.step()
    tierload.save({"model": model, "optimizer": optimizer}, path)
    return states(optimizer)


def loaded(rank: int, ranks: int, paths: list[str], sharded: bool) -> list[Any]:
    """What each store gave, or why it was refused, with the states that there are then."""
    found: list[Any] = []
    for path in paths:
        model, optimizer = made(ranks, sharded)
        try:
            tierload.load(path, into={"model": model, "optimizer": optimizer})
            found.append(states(optimizer))
        except KeyMismatch as error:
            found.append((error.shapes, str(error), states(optimizer)))
        dist.barrier()
    return found


def same(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> bool:
    assert [list(state) for state in got] == [list(state) for state in want]
    pairs = [(state[name], other[name]) for state, other in zip(got, want, strict=True) for name in state]
    return all(type(a) is type(b) and torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def test_b90_states_of_a_part_go_back_to_it_alone(tmp_path: Path) -> None:
    by_two, by_one = str(tmp_path / "by-two"), tmp_path / "by-one"
    before = results(2, saved, by_two)
    model, optimizer = made()
    optimizer.step()
    tierload.save({"model": model, "optimizer": optimizer}, by_one)
    let_go(by_one)

    for rank, (again, whole) in enumerate(results(2, loaded, [by_two, str(by_one)], True)):
        assert same(again, before[rank]), "on the ranks that saved it"
        assert again[0]["state1"].dtype is torch.uint8
        refused(whole)
    for (other,) in results(3, loaded, [by_two], True):
        refused(other)
    for elsewhere, whole in results(2, loaded, [by_two, str(by_one)], False):
        refused(elsewhere)  # as many ranks, and each has all of the model
        assert same(whole, states(optimizer))
    before_load = states(optimizer)
    report: Any = tierload.load(by_two, into={"model": model, "optimizer": optimizer}, strict=False)
    assert len(report.shapes) == 4
    assert {"model/0.weight", "model/1.bias"} <= set(report.loaded), "the model is the same on any ranks"
    assert same(states(optimizer), before_load)


def refused(found: Any) -> None:
    shapes, message, left = found
    assert [key for key in shapes if key.startswith("optimizer/state/")]
    assert "belongs to the part of a rank" in message
    assert left == [], "nothing was changed"
