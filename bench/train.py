"""One process of the demonstration's training run: it resumes from the newest commit, trains, saves, and reports.

Every event is a line of JSON on standard output, so that the process that started it knows when a save begins.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import struct

import torch

import tierload
from bench.gpt import GPT, Shape
from bench.text import TextStream, standard_library

__all__ = ["THREADS", "Run", "bits", "deterministic"]

THREADS = 2  # fixed: the order in which floats are added depends on it
LEARNING_RATE = 1e-3


def deterministic(seed: int) -> None:
    """The same numbers each time, on the same machine and torch."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def bits(loss: float) -> str:
    """The 32 bits of a loss, so that equal means equal and not close."""
    return struct.pack(">f", loss).hex()


def warm_then_cosine(step: int, *, warm: int = 8, end: int = 400) -> float:
    return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(step, end) / end))


class Run:
    """Everything that a training loop holds; ``state`` is what it saves and what it loads into."""

    def __init__(self, shape: Shape | None = None, *, batch: int = 4, text_bytes: int = 8 << 20) -> None:
        shape = shape or Shape()
        self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_then_cosine)
        self.text = TextStream(standard_library(text_bytes), batch=batch, context=shape.context)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "text": self.text,
            "rng": tierload.RNG(),
        }

    @property
    def steps(self) -> int:
        return self.scheduler.last_epoch

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def step(self) -> float:
        loss = self.model.loss(*self.text.next())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def set_learning_rate(self, rate: float) -> None:
        self.scheduler.base_lrs = [rate]
        for group in self.optimizer.param_groups:
            group["initial_lr"] = rate
            group["lr"] = rate * warm_then_cosine(self.steps)

    def plain(self) -> dict[str, object]:
        """The same state as ``torch.save`` takes it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "text": self.text.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def digest(self) -> str:
        """SHA-256 over every weight and moment."""
        whole = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            whole.update(tensor.numpy())
        for moments in self.optimizer.state_dict()["state"].values():
            for name in sorted(moments):
                whole.update(moments[name].numpy())
        return whole.hexdigest()


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


def tell_saved(pending: tierload.PendingSave) -> None:
    """Waits for a save, and tells what became of it."""
    report = pending.result()
    tell(
        saved=report.commit.step,
        loss=report.commit.metrics["loss"],
        seconds=report.seconds,
        waited=report.waited_seconds,
        written=report.written_bytes,
        raw=report.raw_bytes,
        commit=report.commit.id,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="resume from here and save here; without it nothing is saved")
    parser.add_argument("--until", type=int, required=True, help="train up to this step")
    parser.add_argument("--every", type=int, default=4, help="save after so many steps")
    parser.add_argument("--learning-rate", type=float, help="change the learning rate after resuming")
    parser.add_argument("--digest-at", type=int, help="tell the digest of the state at this step")
    options = parser.parse_args()

    resumes = options.store is not None and os.path.exists(options.store)
    deterministic(seed=999 if resumes else 0)  # what follows must come from the store, not from a lucky seed
    run = Run()
    if resumes:
        tierload.load(options.store, into=run.state)
        tell(resumed=run.steps)
    if options.learning_rate:
        run.set_learning_rate(options.learning_rate)
    tierload.guard(run.optimizer)
    pending: tierload.PendingSave | None = None
    while run.steps < options.until:
        rate = run.learning_rate
        loss = run.step()
        tell(step=run.steps, loss=loss, bits=bits(loss))
        if pending is not None and pending.done():
            tell_saved(pending)
            pending = None
        if run.steps == options.digest_at:
            tell(digest_at=run.digest())
        if options.store and run.steps % options.every == 0:
            if pending is not None:
                tell_saved(pending)
            tell(saving=run.steps)
            metrics = {"loss": round(loss, 4), "lr": float(f"{rate:.3g}")}
            pending = tierload.async_save(run.state, options.store, step=run.steps, metrics=metrics)
    if pending is not None:
        tell_saved(pending)
    tell(digest=run.digest(), parameters=sum(p.numel() for p in run.model.parameters()))


if __name__ == "__main__":
    main()
