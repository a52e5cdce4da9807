"""One rank of a job that saves for ever; ranks_storm.py kills and freezes such ranks.

It says on stdout what came of each save, one line each: "durable STEP ID" or "failed STEP WHY".
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.distributed

import tierload

RANKS = 4
SILENT_S = 3.0  # the limit that the saves have

SETTINGS = tierload.Settings(rank_timeout_seconds=SILENT_S, per_rank=("own",))


def state_of(step: int, rank: int) -> dict[str, object]:
    """Every tensor of a step tells it; ``own`` is another on each rank, ``same`` is not."""
    own = torch.full((1000 + rank,), step * RANKS + rank)
    return {"same": torch.full((50_000,), step), "own": {f"rank {rank}": own}, "step": step}


def save(state: dict[str, object], store: str, step: int, late: bool) -> str:
    """The id of the commit, once it is durable."""
    if late:
        return tierload.async_save(state, store, step=step, settings=SETTINGS).durable().id
    return tierload.save(state, store, step=step, settings=SETTINGS).commit.id


def save_for_ever(rank: int, ranks: int, late: bool, store: str, seed: str) -> None:
    """One rank, from what the store holds on: it says on stdout what was acknowledged."""
    chance = random.Random(f"{seed}-{rank}")
    step = 0
    if (Path(store) / "SUPER").exists():
        head = tierload.open(store).head()
        step = 0 if head is None or head.step is None else head.step
    torch.distributed.barrier()  # all have looked before anybody saves
    print("ready", step, flush=True)
    while True:
        step += 1
        time.sleep(chance.choice([0, 0, 0.002, 0.02]))
        try:
            print("durable", step, save(state_of(step, rank), store, step, late), flush=True)
        except tierload.TierloadError as error:
            print("failed", step, f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
            if not isinstance(error, tierload.RankLost):
                raise
