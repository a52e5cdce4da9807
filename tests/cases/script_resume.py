"""Run by itself: a small training run with dropout, shuffled data and augmentation, or the rest of one.

Usage: python -m tests.cases.script_resume whole STORE   trains 3 epochs, saves in the middle and at the end of epochs
       python -m tests.cases.script_resume rest STORE    resumes from each of these, and trains once without saving
Prints a line a step: where it was resumed from, the ids of the batch, and the loss, bit for bit.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import tierload

SAMPLES, BATCH, EPOCHS = 40, 4, 3
SAVE_AT = {4: "middle", 10: "end of epoch", 17: "middle of second", 20: "end of second"}  # by steps done


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


class Run:
    """Everything that a training script holds."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)
        self.data = torch.randn(SAMPLES, 8, generator=source)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        self.noise = np.random.default_rng(9)
        self.loader: dict[str, Any] = {"epoch": 0, "position": 0, "order": None, "step": 0}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "noise": self.noise,
            "rng": tierload.RNG(),
        }

    def next_batch(self) -> list[int]:
        at = self.loader
        if at["order"] is None:
            at["order"] = torch.randperm(SAMPLES)
        ids = at["order"][at["position"] : at["position"] + BATCH].tolist()
        at["position"] += BATCH
        if at["position"] >= SAMPLES:
            at.update(epoch=at["epoch"] + 1, position=0, order=None)
        return ids

    def train(self, label: str, store: str | None = None) -> None:
        while self.loader["epoch"] < EPOCHS:
            ids = self.next_batch()
            x = self.data[ids] * random.uniform(0.9, 1.1) + float(np.random.normal(0, 0.01))
            x = x + torch.from_numpy(self.noise.normal(0, 0.01, 8)).float()
            loss = self.model(x).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.loader["step"] += 1
            print(label, self.loader["step"], ids, loss.item().hex(), sep="|")
            if store and self.loader["step"] in SAVE_AT:
                step = self.loader["step"]
                tierload.save(self.state(), store, step=step, tags=[SAVE_AT[step]], metrics={"loss": loss.item()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, path = sys.argv[1:]
    if what == "whole":
        seed_all()
        Run().train("whole", path)
    else:
        seed_all()
        Run().train("unsaved")
        for tag in SAVE_AT.values():
            run = Run()
            run.loader["order"] = None
            tierload.load(path, tag=tag, into=run.state())
            run.train(tag)
