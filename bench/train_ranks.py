"""One rank of the demonstration's job: it resumes from the newest commit, trains its share of each batch, and saves.

Rank 0 tells events as lines of JSON on standard output; every rank tells what makes it end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierload
from bench.gpt import GPT, Shape
from bench.text import TextStream, standard_library

__all__ = ["RanksRun"]

SHAPE = Shape(layers=4, width=256, context=64, dropout=0.0)
BATCH = 12  # of all ranks together: a share is the same for each of two, three, four and six
SETTINGS = tierload.Settings(rank_timeout_seconds=20)


class RanksRun:
    """A model whose every tensor is spread over the ranks; ``state`` is what they save together."""

    def __init__(self, shape: Shape = SHAPE, *, batch: int = BATCH, text_bytes: int = 8 << 20) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.ranks,))
        self.model = GPT(shape)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.text = TextStream(standard_library(text_bytes), batch=batch, context=shape.context)
        self.steps = 0

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "text": self.text, "steps": self.steps}

    def load(self, store: str) -> None:
        state = self.state
        tierload.load(store, into=state)
        self.steps = int(state["steps"])  # type: ignore[call-overload]

    def step(self) -> float:
        """The loss of the whole batch."""
        inputs, targets = (each.chunk(self.ranks)[self.rank] for each in self.text.next())
        logits = self.model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return whole.item() / self.ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    resumes = os.path.exists(options.store)
    torch.manual_seed(999 if resumes else 0)
    run = RanksRun()
    if resumes:
        run.load(options.store)
        tell(resumed=run.steps, ranks=run.ranks)
    tierload.guard(run.optimizer)
    pending: tierload.PendingSave | None = None
    try:
        while run.steps < options.until:
            loss = run.step()
            tell(step=run.steps, loss=loss)
            if run.steps % options.every == 0:
                finish(pending)
                tell(saving=run.steps)
                pending = tierload.async_save(run.state, options.store, step=run.steps, settings=SETTINGS)
        finish(pending)
    except (tierload.TierloadError, RuntimeError) as error:  # gloo, too, notices when a peer is gone
        print(json.dumps({"rank": run.rank, "ended": f"{type(error).__name__}: {error}"}), flush=True)
        if pending is not None and not isinstance(error, tierload.TierloadError):
            try:
                pending.durable()
            except tierload.TierloadError as lost:
                print(json.dumps({"rank": run.rank, "ended": f"{type(lost).__name__}: {lost}"}), flush=True)
        os._exit(3)  # the others are gone: there is nobody to say goodbye to
    dist.destroy_process_group()
    return 0


def finish(pending: tierload.PendingSave | None) -> None:
    """Waits for a save, and tells what became of it."""
    if pending is not None:
        report = pending.result()
        tell(saved=report.commit.step, waited=report.waited_seconds, seconds=report.seconds, raw=report.raw_bytes)


def tell(**event: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
