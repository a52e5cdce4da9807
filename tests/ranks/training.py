"""A small model that ranks train together, in the ways that torch shards one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HIDDEN, BATCH = 12, 26, 24


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


class Run:
    """A model, its optimizer and its data; ``way`` is how many ranks share a batch, and how many a layer."""

    def __init__(self, way: tuple[int, ...], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.data_ranks = way[0]
        self.mesh: DeviceMesh | None = None
        if len(way) == 2:
            self.mesh = init_device_mesh("cpu", way, mesh_dim_names=("dp", "tp"))
            for block in self.model.blocks:
                parallelize_module(block, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            data_mesh = self.mesh["dp"]
        else:
            data_mesh = init_device_mesh("cpu", way)
        self.data_rank = data_mesh.get_local_rank()
        for block in self.model.blocks:
            fully_shard(block, mesh=data_mesh)
        fully_shard(self.model, mesh=data_mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def train(self, steps: int) -> list[float]:
        """The losses of the next steps, of the whole batch."""
        return list(self._train(steps))

    def _train(self, steps: int) -> Iterator[float]:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            batch = torch.randn(BATCH, WIDTH, generator=generator)
            mine = batch.chunk(self.data_ranks)[self.data_rank]
            loss = (self.model(mine) - mine.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            yield whole.item() / dist.get_world_size()

    def whole(self) -> dict[str, torch.Tensor]:
        """Every parameter and moment, whole, on each rank."""
        found = dict(self.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            for kind, value in self.optimizer.state[parameter].items():
                found[f"{name}.{kind}"] = value
        return {name: full(value) for name, value in found.items()}


def full(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(value, DTensor):
            value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
        return value.detach().clone()
