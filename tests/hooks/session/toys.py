"""A toy run in which everything matters that a resumed one could get wrong: every draw shows in the losses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

import tierload

SAMPLES, BATCH, WIDTH = 26, 4, 6  # 7 batches an epoch, the last one smaller


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from the random numbers of Python, numpy and torch for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand()) + torch.rand(1).item()
        return torch.full((WIDTH,), index / SAMPLES) + 0.1 * noise


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )


@dataclass
class Toy:
    """What a plain loop holds. ``seed`` is that of the process: a resumed one has another."""

    seed: int = 0
    compiled: bool = False
    parts: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.seed)
        self.plain = model()
        self.model: Any = torch.compile(self.plain, backend="eager") if self.compiled else self.plain
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=500)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=6)
        self.ema = AveragedModel(self.plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.loader = StatefulDataLoader(Augmented(), BATCH, shuffle=True)
        self.seen = {"samples": 0}
        names = "model optimizer scheduler scaler ema loader seen".split()
        self.parts = {name: getattr(self, name) for name in names}

    def step(self, *batches: torch.Tensor) -> torch.Tensor:
        """One step of the optimizer, over so many batches; its loss, with all that the run consists of in it."""
        total = torch.zeros(())
        for batch in batches:
            loss = self.model(batch).square().mean()
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
            self.seen["samples"] += len(batch)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.ema.update_parameters(self.plain)
        averaged = sum(float(p.detach().sum()) for p in self.ema.module.parameters())
        return total + averaged + self.scaler.get_scale() + self.optimizer.param_groups[0]["lr"] + self.seen["samples"]


def saved(store: Path) -> list[int | None]:
    """The steps of the head's line, oldest first."""
    with tierload.open(store) as opened:
        return [commit.step for commit in reversed(opened.commits()) if not commit.superseded]
