#!/usr/bin/env python3
"""Kills and freezes ranks of a job that saves, at random moments, and starts it again.

After each end the store opens, what any rank had acknowledged is there or something newer is, every commit loads as one
step had it on all ranks, and the job continues from there. A frozen rank is thawed after a while or is killed: either
the save that it was missing from comes about, or it fails on every rank.

Exit code 0: nothing bad; 1: something bad.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from ranks_job import RANKS, SILENT_S, save_for_ever
from victim import ROOT, Tally, keep, run_storm

sys.path.insert(0, str(ROOT))

import tierload
from tests.ranks.world import Outcome, World

LIMIT_S = 90.0  # no job takes so long from its start to its end
WAYS = ("kill", "kill two", "freeze and kill", "freeze and thaw", "freeze for long")


def all_ready(world: World) -> bool:
    """Waits until all ranks have looked into the store."""
    end = time.monotonic() + LIMIT_S
    while not all("ready" in world.said(rank) for rank in range(RANKS)):
        if time.monotonic() > end or any("Traceback" in world.said(rank) for rank in range(RANKS)):
            return False
        time.sleep(0.01)
    return True


def disturb(world: World, way: str, chance: random.Random) -> None:
    """Does to the job what the way says, and kills what is left of it."""
    first, second = chance.sample(range(RANKS), 2)
    if way.startswith("freeze"):
        world.signal(first, signal.SIGSTOP)
        time.sleep(2 * SILENT_S if "long" in way else chance.uniform(0, 0.5 * SILENT_S))
        world.signal(first, signal.SIGKILL if "kill" in way else signal.SIGCONT)
        time.sleep(chance.uniform(0, 0.5))
    else:
        world.signal(first, signal.SIGKILL)
        if way == "kill two":
            time.sleep(chance.uniform(0, 0.01))
            world.signal(second, signal.SIGKILL)
    time.sleep(chance.uniform(0, 0.5))  # the others find out, and must not commit anything that is not whole


def acknowledged(outcomes: list[Outcome]) -> list[tuple[int, str]]:
    """Steps and ids of the commits that any rank said were durable; an unfinished line is not said."""
    lines = [line.split() for outcome in outcomes for line in outcome.said.split("\n")[:-1]]
    return sorted((int(words[1]), words[2]) for words in lines if len(words) == 3 and words[0] == "durable")


def wrong_after(store: Path, newest: tuple[int, str] | None) -> str:
    """What is wrong with a store, or nothing."""
    try:
        with tierload.open(store) as reader:
            commits = reader.commits()
            if newest is not None and newest[1] not in {commit.id for commit in commits}:
                return f"step {newest[0]} was acknowledged and is gone; there are {[c.step for c in commits]}"
            for commit in commits:
                step = commit.step or 0
                state = reader.load(commit=commit)
                for rank in range(RANKS):
                    found = reader.load(commit=commit, keys="own", rank=rank)
                    own = found["own"].get(f"rank {rank}")  # type: ignore[index]
                    if own is None or not (own == step * RANKS + rank).all():
                        return f"commit {commit.id} of step {step} has another step's values of rank {rank}: {own}"
                if state["step"] != step or not (state["same"] == step).all():  # type: ignore[index]
                    return f"commit {commit.id} of step {step} is not of one moment"
            report = reader.verify(full=True)
            return "" if report.ok else f"verify: {report.damages}"
    except tierload.StoreNotFound as error:
        return "" if newest is None else str(error)
    except tierload.TierloadError as error:
        return f"{type(error).__name__}: {error}"


def storm(directory: Path, points: int, seconds: float, seed: int) -> Tally:
    """So many ends of one job, or as many as there is time for."""
    tally = Tally("kills and freezes of ranks that save together")
    store = directory / "store"
    chance = random.Random(seed)
    newest: tuple[int, str] | None = None
    saves = 0
    ends: Counter[str] = Counter()
    end = time.monotonic() + seconds
    for point in range(points):
        if time.monotonic() > end:
            break
        way = WAYS[point % len(WAYS)]
        late = point % 2 == 1
        world = World(RANKS, save_for_ever, (late, str(store), f"{seed}-{point}"), "tcp" if point % 3 else "file")
        if not all_ready(world):
            tally.failure(f"seed {seed}, point {point}: it does not start: {[*map(world.said, range(RANKS))]}", "start")
            world.end()
            break
        time.sleep(chance.uniform(0, 0.6))
        disturb(world, way, chance)
        outcomes = world.outcomes(LIMIT_S, kill=dict.fromkeys(range(RANKS), 0.0))
        tally.points += 1
        ends[way] += 1
        done = acknowledged(outcomes)
        saves += len({id for _, id in done})
        newest = max([*done, *([newest] if newest else [])], default=None)
        wrong = wrong_after(store, newest)
        raised = [outcome.exception for outcome in outcomes if outcome.exception is not None]
        if raised:
            wrong += f"; it ends by itself: {raised}"
        if wrong and tally.failure(f"seed {seed}, point {point}, {way}: {wrong}", way):
            print(f"    {keep(store, directory / 'log', f'ranks-{seed}-{point}')}")
    tally.note = f"{saves} saves acknowledged, " + ", ".join(f"{n} {way}" for way, n in ends.items())
    return tally


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_storm(__doc__, 100, storm))
