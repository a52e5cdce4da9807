"""A plain loop in a process of its own: ``python -m tests.hooks.session.script STORE STEPS``."""

from __future__ import annotations

import os
import sys

import torch

import tierload
from tests.hooks.interrupts import die_in_save, maybe_end, tell
from tests.hooks.session.toys import Toy


def main(store: str, steps: int) -> None:
    torch.set_num_threads(1)
    die_in_save()
    toy = Toy(seed=os.getpid() if os.path.exists(store) else 0)  # what follows must come from the store
    with tierload.Session(store, every=5, keep=4, **toy.parts) as run:
        batches = run.batches(toy.loader)
        for step in run.steps(steps):
            loss = toy.step(next(batches), next(batches))
            maybe_end(step)
            if "TWICE" in os.environ:
                maybe_end(step)
            run.log(loss=loss, epoch=batches.epoch)
            tell(step, loss)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
