"""Which cores the workers of a load get: not those that the training computes on, where there are others."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

__all__ = ["WorkerCores", "numa_nodes", "worker_cores"]

_NODES = Path("/sys/devices/system/node")

_WORKERS_MAX = 16  # as many as Settings.threads takes by itself

_LOWER = 3
"""The nice value of workers that share cores: about a third of a core's time while the training wants all of it. With
10 it was a tenth, beside other processes too (docs/decisions/0024)."""


@dataclass(frozen=True, slots=True)
class WorkerCores:
    """Where workers run: ``count`` of them on ``cores``; ``shared`` with the training, at a lower priority, or not.
    ``node`` is the NUMA node of the training's cores, None where there is only one, or they are on several."""

    cores: tuple[int, ...]
    count: int
    shared: bool
    node: int | None

    def __str__(self) -> str:
        cores = _listed(self.cores)
        if self.shared:
            return f"{self.count} workers share cores {cores} with the training, at a lower priority"
        return f"{self.count} workers have cores {cores} to themselves"

    def settle(self, thread: int | None = None) -> str | None:
        """Puts a thread of this process, by its native id, on these cores; the calling one if None. Where they are
        shared its priority is lowered as well, for good: that is for threads that do nothing else.

        Returns why that did not work, which is no failure: the thread then runs where it can. None if it did.
        """
        thread = threading.get_native_id() if thread is None else thread
        try:
            os.sched_setaffinity(thread, self.cores)
            if self.shared:
                os.setpriority(os.PRIO_PROCESS, thread, max(_LOWER, os.getpriority(os.PRIO_PROCESS, thread)))
        except OSError as error:
            return f"thread {thread} could not be put on cores {_listed(self.cores)}: {error.strerror}"
        return None


def worker_cores(nodes: dict[int, frozenset[int]] | None = None) -> WorkerCores:
    """Cores for workers, by what the calling thread may use (which honours cpusets and taskset) and the threads that
    torch computes with, the calling one among them.

    The training is taken to use the first of its cores, as many as torch has threads. Where there are more, workers
    get the others, those of the training's NUMA node first; else they share all. ``nodes`` are the cores of each node,
    as ``numa_nodes`` says.
    """
    nodes = numa_nodes() if nodes is None else nodes
    allowed = sorted(os.sched_getaffinity(0))
    training = allowed[: torch.get_num_threads()]
    homes = [node for node, cores in nodes.items() if cores & set(training)]
    node = homes[0] if len(homes) == 1 and len(nodes) > 1 else None
    near = frozenset().union(*(nodes[home] for home in homes))
    others = sorted(allowed[len(training) :], key=lambda core: (core not in near, core))
    if not others:
        return WorkerCores(tuple(allowed), min(len(allowed), _WORKERS_MAX), True, node)
    chosen = others[:_WORKERS_MAX]
    return WorkerCores(tuple(chosen), len(chosen), False, node)


@cache  # a machine keeps them
def numa_nodes(root: Path = _NODES) -> dict[int, frozenset[int]]:
    """The cores of each NUMA node that has some; empty where the system does not tell."""
    found: dict[int, frozenset[int]] = {}
    for path in root.glob("node[0-9]*"):
        try:
            cores = _parsed((path / "cpulist").read_text())
        except OSError:
            continue  # a sandbox that shows the folder and not what is in it
        if cores:
            found[int(path.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def _parsed(text: str) -> frozenset[int]:
    """Cores of a list as the kernel writes it: 0-3,8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _listed(cores: tuple[int, ...]) -> str:
    """Cores as the kernel writes them."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
