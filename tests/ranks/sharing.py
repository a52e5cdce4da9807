"""What ranks do in the tests of loading together: states of many small pages, and a count of bytes that are read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard

import tierload
from tests.ranks.jobs import spread, whole
from tierload import Settings
from tierload.engine import loading, sharing
from tierload.engine.shards import Shards

SETTINGS = Settings(page_bytes=4096, pack_below_bytes=256, compression="off", threads=2)
SHAPES = {"a": (96, 130), "b": (250, 24), "c": (31,), "d": (5000,), "e": (48, 7, 6)}

ROWS, COLUMNS, GRID = ((4,), [Shard(0)]), ((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)])
THREE, EIGHT, COPIES = ((3,), [Shard(0)]), ((8,), [Shard(0)]), ((4,), [Replicate()])
Layout = tuple[tuple[int, ...], list[Any]]


def values() -> dict[str, torch.Tensor]:
    """The whole state: what is spread, and plain tensors."""
    found = {name: whole(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    return found | {"plain": whole((1999,), 9), "small": whole((5,), 10)}


def on(layout: Layout, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that have the dimensions, spread."""
    mesh, placements = layout
    fits = {name for name, shape in SHAPES.items() if all(p.is_replicate() or p.dim < len(shape) for p in placements)}
    return {name: spread(one, mesh, placements) if name in fits else one for name, one in tensors.items()}


def save(rank: int, ranks: int, path: str, layout: Layout, settings: Settings = SETTINGS) -> None:
    """One commit by all ranks."""
    tierload.save(on(layout, values()), path, step=1, settings=settings)


def target(layout: Layout) -> dict[str, torch.Tensor]:
    """Zeros."""
    return on(layout, {name: torch.zeros_like(one) for name, one in values().items()})


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def opened(path: str, limit: float = 20.0) -> tierload.Store:
    """For reading, with a limit on waits."""
    return tierload.open(path, settings=Settings(threads=2, rank_timeout_seconds=limit))


class Counting:
    """A manifest that counts the stored bytes of every page that is read."""

    def __init__(self, manifest: Any, counts: Counter[str]) -> None:
        self._manifest = manifest
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manifest, name)

    def read(self, pages: Any, **more: Any) -> None:
        stored = loading.table_of(self._manifest).pages["stored_length"]
        self._counts["bytes"] += int(stored[np.unique(pages)].sum())
        self._manifest.read(pages=pages, **more)


def count_reads() -> Counter[str]:
    """What this process reads from now on, in loads of commits by several ranks."""
    counts: Counter[str] = Counter()
    found = Shards.manifest
    Shards.manifest = lambda self, rank: Counting(found(self, rank), counts)  # type: ignore[method-assign,assignment,return-value]
    return counts


def stored_bytes(path: str) -> int:
    """Of all shards of the head."""
    with tierload.open(path) as store:
        head = store.head()
        assert head is not None
        return sum(loading.table_of(store._manifest(head, rank)).stored_bytes() for rank in range(head.ranks))


def few_at_a_time() -> None:
    """Many waves, and batches that are not kept."""
    sharing._SHARED_BYTES = 2 * 6 * 4096
    sharing._KEPT_PARTS = 40
    loading._BATCH = 64


__all__ = [
    "COLUMNS",
    "COPIES",
    "EIGHT",
    "GRID",
    "ROWS",
    "THREE",
    "Layout",
    "count_reads",
    "few_at_a_time",
    "local",
    "opened",
    "save",
    "stored_bytes",
    "target",
    "values",
]
