"""Random states in real ranks: what each of them loads is, bit for bit, what it saved."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tierload
from tests.ranks.training import full
from tests.ranks.world import results
from tierload import Settings

SHAPES = [(), (3,), (0,), (2, 3), (1, 5), (5, 1, 2), (64, 40), (300, 20), (7, 0, 2), (1000,)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool, torch.float16, torch.uint8]
OTHERS = "again view int float array bytes generator random sparse quantized list per_rank container".split()
STATES = 25


class Made:
    """A state. All ranks draw the same numbers from ``draw``, so they come to the same keys, shapes and layouts;
    ``rank`` has a say in values, and in what shares memory with what."""

    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        self.draw, self.rank, self.ranks = random.Random(seed), rank, ranks
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.tensors: list[torch.Tensor] = []
        self.spread: list[torch.Tensor] = []
        self.containers: list[Any] = []
        self.state = {f"s{number}": self.tree(0) for number in range(self.draw.randrange(3, 9))}

    def values(self, seed: int) -> torch.Tensor:
        shape, dtype = self.draw.choice(SHAPES), self.draw.choice(DTYPES)
        found = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9
        if found.numel() and seed % 5 == 0 and dtype.is_floating_point:
            found.view(-1)[0] = float("nan")
        return (torch.complex(found, -found) if dtype.is_complex else found).to(dtype)

    def tensor(self) -> torch.Tensor:
        """Of the same values on all ranks, on each its own, or other ones on one of them."""
        odd, kind, form = self.draw.randrange(self.ranks), self.draw.randrange(5), self.draw.randrange(8)
        seed = self.draw.randrange(1000) + (self.rank * 1000 if kind == 0 else (self.rank == odd) * 7777 * (kind == 1))
        found = self.values(seed)
        if form == 0:
            found = found.t() if found.dim() == 2 else found.conj()
        elif form == 1 and found.dim() > 1 and self.rank == odd:
            found = found.transpose(0, 1).contiguous().transpose(0, 1)
        elif form == 2 and found.dtype is torch.float32:
            found = torch.nn.Parameter(found, requires_grad=kind > 2)
        elif form == 3 and self.tensors:
            other = self.draw.choice(self.tensors)
            if type(other) is torch.Tensor:
                found = other if self.rank == odd else other.clone()
        self.tensors.append(found)
        return found

    def part(self) -> torch.Tensor:
        whole = self.values(self.draw.randrange(1000))
        cut = self.draw.choice([None, *range(whole.dim())])
        placements = [Replicate() if cut is None else Shard(cut)]
        found: torch.Tensor = distribute_tensor(whole, self.mesh, placements, src_data_rank=None)
        if self.draw.random() < 0.3 and whole.dtype.is_floating_point:
            found = torch.nn.Parameter(found)
        self.spread.append(found)
        return found

    def leaf(self) -> Any:
        kind = self.draw.choice(["tensor"] * 6 + ["part"] * 4 + OTHERS)
        who, number = self.draw.choice([0, 0, self.rank]), self.draw.randrange(99)
        if kind == "again" and self.spread:
            return self.draw.choice(self.spread)
        if kind == "view" and self.tensors:
            base = self.draw.choice(self.tensors)
            return base[1:] if base.dim() and type(base) is torch.Tensor else base
        if kind == "container" and self.containers:
            return self.draw.choice(self.containers)
        made: dict[str, Any] = {
            "int": number + who,
            "float": (float("nan"), -0.0, 0.1)[(number + who) % 3],
            "array": np.arange(number + who) * (1 + who),
            "bytes": bytes([who + 1]) * (700 * number),
            "generator": torch.Generator().manual_seed(number + who),
            "random": random.Random(number + who),
            "sparse": torch.zeros(4, 4).fill_diagonal_(float(who)).to_sparse(),
            "quantized": torch.quantize_per_tensor(torch.ones(3, 4) * who, 0.1 + who, 0, torch.qint8),
            "list": [who] * (who + 1),
            "per_rank": {"per_rank": {str(self.rank): torch.arange(self.rank + 2), "none": [None] * self.rank}},
        }
        return made[kind] if kind in made else self.part() if kind == "part" else self.tensor()

    def tree(self, depth: int) -> Any:
        if depth > 3 or self.draw.random() < 0.35:
            return self.leaf()
        kind = self.draw.choice([dict, dict, list, tuple, collections.OrderedDict, collections.deque])
        inner = [self.tree(depth + 1) for _ in range(self.draw.randrange(1, 4))]
        named = issubclass(kind, dict)
        found = kind((f"k{number}/~*"[: 2 + number], one) for number, one in enumerate(inner)) if named else kind(inner)
        if kind in (dict, list):
            self.containers.append(found)
        return found


def bits(value: torch.Tensor) -> bytes:
    return value.detach().to_dense().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: Any, want: Any, where: str) -> None:
    if isinstance(want, DTensor):
        assert bits(full(got)) == bits(full(want)), where
    elif isinstance(want, torch.Tensor) and want.is_quantized:
        assert torch.equal(got, want), where
    elif isinstance(want, torch.Tensor):
        assert (type(got), got.dtype, got.shape, got.layout) == (type(want), want.dtype, want.shape, want.layout), where
        assert bits(got) == bits(want), where
    elif isinstance(want, torch.Generator):
        assert torch.equal(got.get_state(), want.get_state()), where
    elif isinstance(want, random.Random):
        assert got.getstate() == want.getstate(), where
    elif isinstance(want, np.ndarray):
        np.testing.assert_array_equal(got, want, where)
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}/{key}")
    elif isinstance(want, (list, tuple, collections.deque)):
        assert len(got) == len(want), where
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}/{number}")
    else:
        assert (type(got), repr(got)) == (type(want), repr(want)), where


def blanked(value: Any) -> None:
    """Other values in all tensors that can be filled."""
    if isinstance(value, (dict, list, tuple, collections.deque)):
        for inner in value.values() if isinstance(value, dict) else value:
            blanked(inner)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        with torch.no_grad():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()


def kept(rank: int, ranks: int, folder: str, late: bool) -> None:
    settings = Settings(page_bytes=4096, pack_below_bytes=1024, threads=1, per_rank=("**/per_rank", "per_rank"))
    for seed in range(STATES):
        path, seed = f"{folder}/{seed}", seed + 1000 * ranks
        state = Made(seed, rank, ranks).state
        if late:
            tierload.async_save(state, path, settings=settings).durable()
        else:
            tierload.save(state, path, settings=settings)
        assert_same(tierload.load(path), state, f"{seed}")
        into = Made(seed, rank, ranks).state
        blanked(into)
        tierload.load(path, into=into)
        assert_same(into, state, f"{seed} into")
        dist.barrier()
        if rank == 0:
            with tierload.open(path) as store:
                assert store.verify(full=True).ok, seed


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "late"), [(2, True), (3, False), (4, True)])
def test_every_rank_loads_what_it_saved(tmp_path: Path, ranks: int, late: bool) -> None:
    results(ranks, kept, str(tmp_path), late, limit=120)
