"""What ranks do in tests: states whose right values are known from the rank alone."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

ROWS, COLUMNS = 24, 10


def whole(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor whose every element is another number."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + 1000 * seed).reshape(shape)


def spread(tensor: torch.Tensor, mesh_shape: tuple[int, ...], placements: list[Placement]) -> DTensor:
    """A whole tensor, of which this rank keeps its part."""
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape)
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def state_of(rank: int, mesh_shape: tuple[int, ...], placements: list[Placement], seed: int = 0) -> dict[str, Any]:
    """Spread, replicated, plain and own values."""
    everywhere = [Replicate()] * len(mesh_shape)
    generator = torch.Generator().manual_seed(rank)
    return {
        "w": spread(whole((ROWS, COLUMNS), seed), mesh_shape, placements),
        "same": spread(whole((7,), seed + 1), mesh_shape, everywhere),
        "plain": whole((5, 3), seed + 2),
        "mine": torch.full((4,), float(rank)),
        "step": 12,
        "loader": {"position": rank * 100, "epoch": 3},
        "rng": generator,
        "python": random.Random(rank),
        "names": ["a", "b"],
    }


def rank_and_ranks() -> tuple[int, int]:
    """Who this process is."""
    return dist.get_rank(), dist.get_world_size()


__all__ = ["COLUMNS", "ROWS", "Replicate", "Shard", "rank_and_ranks", "spread", "state_of", "whole"]
