"""Run by itself, in processes that differ in hash seed and threads: the same saves, whose files must be the same.

Usage: python -m tests.cases.script_determinism STORE THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import tierload
from tierload import Settings


def state_of(number: int, *, backwards: bool = False) -> dict[str, Any]:
    """Tensors of several dtypes and sizes, sets, and values whose order or address differs between processes."""
    source = torch.Generator().manual_seed(number)
    state: dict[str, Any] = {f"layer.{n}": torch.randn(50 + 700 * n, generator=source) for n in range(12)}
    state |= {
        "big": torch.randn(600, 1000, generator=source).bfloat16(),
        "zeros": torch.zeros(300_000),
        "frozen": torch.arange(200_000),
        "names": {f"n{n}" for n in range(50)},
        "frozen names": frozenset({"a", 1, (2, "b"), None, b"x"}),
        "by type": {int: 1, "step": number}.get("step"),
        "metadata": {f"k{n}": str(n) for n in range(16)},
        "model": torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30)),
    }
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source))
    return dict(reversed(state.items())) if backwards else state


def save_all(path: Path, threads: int, *, backwards: bool = False) -> None:
    """Three saves, a rollback, a fourth save, and a collection."""
    for number, compression in ((1, "fast"), (2, "fast"), (3, "small")):
        settings = Settings(threads=threads, compression=compression, page_bytes=65536, max_segment_size_mb=1)
        tierload.save(state_of(number, backwards=backwards), path, step=number, settings=settings)
    tierload.rollback(path, 2)
    tierload.save(state_of(4, backwards=backwards), path, step=4)
    tierload.open(path, mode="w").collect(keep=3)


if __name__ == "__main__":
    save_all(Path(sys.argv[1]), int(sys.argv[2]))
