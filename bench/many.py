"""One process that saves and loads many small tensors, and prints seconds and by how much its memory grew."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tierload
from bench.peaks import growth

__all__ = ["many_tensors"]


def many_tensors(count: int) -> dict[str, torch.Tensor]:
    """Scalars, as optimizers and metrics have them, each with a storage of its own."""
    return {f"layer.{number}.weight": torch.full((), float(number)) for number in range(count)}


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    tierload.save({"w": torch.zeros(64)}, folder / "other")  # imports, threads
    tierload.load(folder / "other")
    state = many_tensors(count)
    store = tierload.open(folder / f"store-{count}", mode="w")
    found: dict[str, tuple[float, int]] = {}

    def measure(name: str, action: Callable[[], object]) -> None:
        seconds: list[float] = []

        def timed() -> object:
            start = time.perf_counter()
            result = action()
            seconds.append(time.perf_counter() - start)
            return result

        grown = growth(timed)
        found[name] = seconds[0], grown

    measure("save", lambda: store.save(state))
    measure("save again", lambda: store.save(state))
    measure("load", store.load)
    measure("load into", lambda: store.load(into=state))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
