"""A store by several ranks that tests look into: made once, with commits that differ in one thing each."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

import tierload
from tests.ranks.jobs import spread, whole
from tests.ranks.world import results
from tierload import Settings

RANKS = 2
SETTINGS = Settings(compression="fast", page_bytes=4096, pack_below_bytes=1024, threads=1)

FIRST, OWN_CHANGED, OTHER_CUT, SHARED_CHANGED, MORE_RANKS = 1, 2, 3, 4, 5
"""Steps: each says what is other than in the one before."""


def looked_state(rank: int, ranks: int, step: int) -> dict[str, Any]:
    """What a rank has at a step. ``bulk`` is the same on all, and large enough to be cut among them."""
    cut = Shard(1 if step >= OTHER_CUT else 0)
    bulk = whole((40, 100), 3)
    if step >= SHARED_CHANGED:
        bulk[39, 99] = -1
    return {
        "w": spread(whole((24, 60)), (ranks,), [cut]),
        "same": spread(whole((7,), 1), (ranks,), [Replicate()]),
        "bulk": bulk,
        "small": whole((5, 3), 2),
        "empty": torch.empty(0, 4),
        "mine": torch.full((4,), float(rank)),
        "loader": {"position": 100 * rank + (7 if step >= OWN_CHANGED and rank == 1 else 0)},
    }


def _save(rank: int, ranks: int, path: str, first: int, last: int) -> None:
    with tierload.open(path, mode="w", settings=SETTINGS) as store:
        for step in range(first, last + 1):
            store.save(looked_state(rank, ranks, step), step=step)
            if rank == 0:
                store.record("lr", 1 / step, step=step)


@cache
def looked_at() -> Path:
    """The store: steps 1 to 4 by two ranks, and step 5 by three. Tests that change it take a copy."""
    folder = Path(tempfile.mkdtemp(prefix="tierload-looked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    results(RANKS, _save, str(folder / "store"), FIRST, SHARED_CHANGED)
    results(3, _save, str(folder / "store"), MORE_RANKS, MORE_RANKS)
    return folder / "store"


def shard(store: Path, txid: int, rank: int) -> Path:
    """A rank's shard that a transaction wrote."""
    [file] = (store / "man").glob(f"*-{txid:012x}.r{rank:04x}")
    return file
