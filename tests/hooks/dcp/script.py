"""A training script that saves by dcp.async_save: ``python -m tests.hooks.dcp.script KIND PATH``, where KIND is
``tierload`` or ``stock``, torch's own storage, for which PATH is a folder of checkpoints."""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.hooks.interrupts import die_in_save, maybe_end, tell
from tierload.hooks.dcp import Reader, Writer

STEPS, EVERY = 60, 10


class App:
    """All of a run that goes on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        parts = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)]
        self.model = torch.nn.Sequential(*parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rest = {"scheduler": self.scheduler.state_dict(), "step": self.step, "rng": torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer} | rest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])

    def train(self) -> None:
        self.step += 1
        x = torch.randn(12, 8)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        tell(self.step, loss)


def main(kind: str, path: str) -> None:
    die_in_save()
    app = App()
    if os.path.exists(path):
        newest = max(Path(path).glob("step-*"), key=lambda each: int(each.name[5:]), default=None)
        reader = Reader(path) if kind == "tierload" else dcp.FileSystemReader(newest or path)
        dcp.load({"app": app}, storage_reader=reader)
    pending: Future[Any] | None = None
    while app.step < STEPS:
        app.train()
        if app.step % EVERY == 0:
            if pending is not None:
                pending.result()
            folder = f"{path}/step-{app.step}"
            writer = Writer(path) if kind == "tierload" else dcp.FileSystemWriter(folder)
            pending = dcp.async_save({"app": app}, checkpoint_id=folder, storage_writer=writer)
        maybe_end(app.step)
    if pending is not None:
        pending.result()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # that it is alone
    torch.set_num_threads(1)
    main(*sys.argv[1:])
