"""B83 and B45 among ranks: models built on meta, whole or fully sharded, are given what is stored; what is not stored
is told, and never left as memory that nobody has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tierload
from tests.ranks.training import full
from tests.ranks.world import results
from tierload import KeyMismatch


class Tied(torch.nn.Module):
    """Embedding and head are one; a buffer is computed and not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.mix = torch.nn.Linear(6, 5)
        self.back = torch.nn.Linear(5, 6)
        self.head = torch.nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.compute()

    def compute(self) -> None:
        with torch.device("cpu"):
            self.register_buffer("inv_freq", 1.0 / torch.arange(1.0, 7.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.inv_freq
        found: torch.Tensor = self.head(self.back(torch.relu(self.mix(x))))
        return found


def made(way: str, ranks: int, *, meta: bool) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    with torch.device("meta" if meta else "cpu"):
        model = Tied()
        if meta:
            model.register_buffer("inv_freq", torch.empty(6), persistent=False)
    whole: torch.nn.Module = model
    if way == "fully sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif not meta:  # a model on meta cannot be broadcast
        whole = DistributedDataParallel(model)
    return model, whole, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number in range(5):
        loss = model(torch.arange(number, number + 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_meta(rank: int, ranks: int, way: str, path: str) -> None:
    model, whole, optimizer = made(way, ranks, meta=False)
    steps(whole, optimizer)
    tierload.save({"model": whole, "optimizer": optimizer}, path)
    count = len(list(model.named_parameters()))
    before = {name: full(value) for name, value in model.named_parameters()}

    other, _, theirs = made(way, ranks, meta=True)
    # The optimizer stands first: its states are made beside parameters that have no memory yet.
    target = {"optimizer": theirs, "model": other}
    with pytest.raises(KeyMismatch) as found:
        tierload.load(path, into=target)
    assert found.value.missing == ("model/inv_freq",)
    assert all(parameter.is_meta for parameter in other.parameters()), "nothing was changed"
    other.compute()  # type: ignore[operator]
    held = [id(parameter) for parameter in other.parameters()]
    report: Any = tierload.load(path, into=target)
    assert {"model/embed.weight", "model/mix.bias"} <= set(report.loaded)
    assert [id(parameter) for parameter in other.parameters()] == held, "those that the optimizer has"
    assert other.embed.weight is other.head.weight  # type: ignore[union-attr]
    assert len(list(other.named_parameters())) == count
    assert all(torch.equal(full(value), before[name]) for name, value in other.named_parameters())
    again = DistributedDataParallel(other) if way == "ddp" else other
    assert steps(again, theirs) == steps(whole, optimizer)


@pytest.mark.parametrize("way", ["ddp", "fully sharded"])
def test_b83_models_built_on_meta(tmp_path: Path, way: str) -> None:
    results(2, on_meta, way, str(tmp_path / "store"))
