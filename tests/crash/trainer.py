"""A training run that saves in the background, guarded, beside records, tags and collections; storms.py ends it.

It continues from what the store holds and says on stdout what was acknowledged, one line each: "durable STEP ID" once a
commit is. Every tensor of the state of a step tells that step.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress

import torch

import tierload
from tierload import PendingSave, Settings

KEEP = 4
WEIGHTS = 200_000


def say(*words: object) -> None:
    """At once: what a killed process had buffered is lost."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Run:
    """A model whose weights are all the number of the step, and its saves."""

    def __init__(self, store: str, chance: random.Random) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(WEIGHTS))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        tierload.guard(self.optimizer)
        self.step = 0
        self.pending: list[PendingSave] = []
        settings = Settings(
            page_bytes=1 << 16,
            max_segment_size_mb=1,
            threads=chance.choice([1, 2]),
            bandwidth_cap_mbps=chance.choice([0, 4.0, 20.0]),
            max_in_flight=2,
            on_busy=chance.choice(["wait", "skip", "queue"]),
            flush_interval_ms=chance.choice([0, 20]),
            grace_seconds=chance.choice([0.0, 25.0]),
        )
        self.store = tierload.open(store, mode="w", settings=settings)
        with suppress(tierload.CommitNotFound):
            tierload.load(store, into=self.state())
            self.step = int(self.weight[0])

    def state(self) -> dict[str, object]:
        """What is saved: half of it guarded, the other half copied at the call."""
        return {"weight": self.weight, "optimizer": self.optimizer, "twice": self.weight.detach() * 2}

    def train(self) -> None:
        """One step: every weight is the next number."""
        self.weight.grad = torch.full_like(self.weight, -1.0)
        self.optimizer.step()
        self.step += 1

    def save(self) -> None:
        self.pending.append(self.store.async_save(self.state(), step=self.step))

    def acknowledge(self) -> None:
        for save in [save for save in self.pending if save.done()]:
            self.pending.remove(save)
            if not save.skipped:
                say("durable", save.step, save.durable().id)

    def tag(self) -> None:
        self.store.tag(f"t{self.step % 3}", self.store.head())

    def collect(self) -> None:
        self.store.collect(keep=KEEP)


def train_for_ever(store: str, seed: str) -> None:
    """Until somebody ends it."""
    chance = random.Random(seed)
    run = Run(store, chance)
    say("ready", run.step)
    others: list[Callable[[], object]] = [
        run.tag,
        run.collect,
        lambda: run.store.record("step", run.step),
        lambda: run.store.record("step", run.step, sync=False),
    ]
    while True:
        run.train()
        if chance.random() < 0.7:
            run.save()
        if run.store.head() is not None:
            chance.choice(others)()
        run.acknowledge()
