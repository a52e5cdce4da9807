"""What ranks save and load by DCP in these tests: tensors whose right values are known, spread in many ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.ranks.jobs import whole

Layout = tuple[tuple[int, ...], list[Placement]]

LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"alone": ((1,), [Shard(0)])},
    2: {"rows": ((2,), [Shard(0)]), "columns": ((2,), [Shard(1)]), "copies": ((2,), [Replicate()])},
    3: {"rows": ((3,), [Shard(0)])},
    4: {
        "rows": ((4,), [Shard(0)]),
        "columns": ((4,), [Shard(1)]),
        "copies": ((4,), [Replicate()]),
        "grid": ((2, 2), [Shard(0), Shard(1)]),
        "turned": ((2, 2), [Shard(1), Shard(0)]),
        "rows twice": ((2, 2), [Shard(0), Shard(0)]),
        "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    },
}
SHAPES = {"even": (8, 12), "uneven": (7, 5), "deep": (13, 6, 3), "few": (3, 2), "none": (0, 4), "long": (2000, 9)}


@dataclass
class Config:
    """What DCP would pickle."""

    width: int


mesh_of: Callable[[tuple[int, ...]], DeviceMesh] = cache(lambda shape: init_device_mesh("cpu", shape))


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    """The whole tensors, which differ from one another, and by seed."""
    found = {name: whole(shape, seed + number) for number, (name, shape) in enumerate(SHAPES.items())}
    return found | {"half": whole((9, 4), seed + 50).bfloat16(), "flags": whole((6, 6), seed).remainder(2).bool()}


def state_of(layout: Layout, seed: int = 0) -> dict[str, Any]:
    """A nested state of them, with what is no spread tensor."""
    mesh, placements = mesh_of(layout[0]), layout[1]
    tensors = {n: distribute_tensor(one, mesh, placements, src_data_rank=None) for n, one in values(seed).items()}
    plain = {"scalar": torch.tensor(1.5 + seed), "plain": whole((5, 3), seed + 60)}
    return {"model": tensors, "rest": {"list": [plain["plain"], {"in": plain["scalar"]}], "n": 3 + seed, "t": (1, "a")}}


def empty_of(layout: Layout) -> dict[str, Any]:
    """A target: the same with nothing in it."""
    state = state_of(layout)
    with torch.no_grad():
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        state["rest"]["list"][0].zero_()
        state["rest"]["list"][1]["in"].zero_()
    state["rest"] |= {"n": None, "t": None}
    return state


def differences(found: dict[str, Any], layout: Layout, seed: int = 0) -> list[str]:
    """The places where a loaded state is not what was saved, bit for bit."""
    right = state_of(layout, seed)
    wrong = [
        name
        for name, tensor in right["model"].items()
        if not torch.equal(found["model"][name].to_local(), tensor.to_local())
    ]
    pairs = [(found["rest"]["list"][0], right["rest"]["list"][0])]
    pairs += [(found["rest"]["list"][1]["in"], right["rest"]["list"][1]["in"])]
    wrong += [f"rest {number}" for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    return wrong + [name for name in ("n", "t") if found["rest"][name] != right["rest"][name]]


def save(state: dict[str, Any], **options: Any) -> Any:
    """``dcp.save`` without its remarks on processes that are alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.save(state, **options)


def load(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """``dcp.load`` likewise; the state, filled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, **options)
    return state


def raised(call: Callable[[], object]) -> dict[int, str]:
    """What DCP says that failed, by rank: the kind of error and its message."""
    try:
        call()
    except CheckpointException as error:
        return {rank: f"{type(one[0]).__name__}: {one[0]}" for rank, one in error.failures.items()}
    return {}
