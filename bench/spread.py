"""What the ranks of one measurement do; each function is run by all of them (tests.ranks.world)."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, empty

import tierload
from bench.measuring import drop_cached
from bench.peaks import growth
from tierload import Settings

__all__ = ["Way", "durable_times", "read_back", "save_once"]

Way = tuple[tuple[int, ...], list[Placement]]
State = dict[str, Any]
_COLUMNS = 4096


def spread_state(way: Way, tensors: int, rows: int) -> State:
    """Matrices of bfloat16, of which this rank holds its part, in memory that has been touched."""
    mesh = init_device_mesh("cpu", way[0])
    made = {
        f"layer.{n}": empty(rows + n, _COLUMNS, dtype=torch.bfloat16, device_mesh=mesh, placements=way[1])
        for n in range(tensors)
    }
    for tensor in made.values():
        tensor.to_local().zero_()
    return made


def refresh(state: State, seed: int) -> None:
    """Other numbers, distributed as weights are."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.normal_(0, 0.02, generator=generator)


def save_once(rank: int, ranks: int, path: str, way: Way, tensors: int, rows: int) -> None:
    """One commit of random numbers."""
    state = spread_state(way, tensors, rows)
    refresh(state, rank)
    tierload.save(state, path, step=1)


def read_back(
    rank: int, ranks: int, path: str, way: Way, tensors: int, rows: int, together: bool, rounds: int
) -> list[tuple[int, int, float]]:
    """Of each cold load: bytes that this rank made the kernel read, by how much it grew at the most, and seconds."""
    state = spread_state(way, tensors, rows)
    few = {"layer.0": state["layer.0"]}
    found = []
    with tierload.open(path) as store:
        store.load(into=few, keys="layer.0", together=together)  # threads, connections and manifests
        for _ in range(rounds):
            if rank == 0:
                drop_cached(Path(path))
            dist.barrier()
            before, began = _read_bytes(), time.perf_counter()
            grown = growth(lambda: store.load(into=state, together=together))
            found.append((_read_bytes() - before, grown, time.perf_counter() - began))
            dist.barrier()
    return found


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


Times = dict[str, list[tuple[float, float]]]


def durable_times(rank: int, ranks: int, folder: str, tensors: int, rows: int, rounds: int) -> Times:
    """Seconds until a commit is durable, of as many bytes by all ranks as by rank 0 alone, in turn; and those of the
    processor in this process."""
    mine = spread_state(((ranks,), [Shard(0)]), tensors, rows)
    whole = {}
    if rank == 0:
        whole = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in mine.items()}
    found: Times = {}
    ways = [(who, late) for late in (False, True) for who in ("all", "one")]
    for number in range(rounds + 1):  # the first does not count
        for who, late in ways if number % 2 else ways[::-1]:
            state = mine if who == "all" else whole
            refresh(state, 1000 * number + rank)
            seconds = 0.0, 0.0
            if who == "all" or rank == 0:
                seconds = _durable(Path(folder) / f"{number}-{who}-{late}", state, who, late, rank)
            dist.barrier()
            if number:
                found.setdefault(f"{'async_save' if late else 'save'}, {who}", []).append(seconds)
    return found


def _durable(path: Path, state: State, who: str, late: bool, rank: int) -> tuple[float, float]:
    settings = Settings(ranks="all" if who == "all" else "one")
    with tierload.Store(path, mode="w", settings=settings) as store:
        store.save({"step": 0}, step=0)  # the store is there, and who takes part is known
        if late:
            store.prepare(state)
        if who == "all":
            dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        if late:
            store.async_save(state, step=1).durable()
        else:
            store.save(state, step=1)
        seconds = time.perf_counter() - began, time.process_time() - began_cpu
        if who == "all":
            dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    return seconds
