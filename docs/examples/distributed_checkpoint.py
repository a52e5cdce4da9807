"""Training whose checkpoints go through torch.distributed.checkpoint into one tierload store.

Alone, or on any number of ranks; started again, also with another number of them, it goes on where it was:

    python docs/examples/distributed_checkpoint.py runs/toy 20
    torchrun --nproc-per-node 2 docs/examples/distributed_checkpoint.py runs/toy 40
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierload
from tierload.hooks.dcp import Reader, Writer


class App:
    """A model and its optimizer, as DCP saves and loads them; it is sharded where there are several ranks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        if dist.is_initialized():
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was loaded."""
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step = state["step"]

    def train(self) -> float:
        """One step; its loss."""
        self.step += 1
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(self.step))
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def saved(path: str) -> bool:
    """Whether there is a commit; a run that was killed in its first save leaves a store without one."""
    try:
        with tierload.open(path) as store:
            return store.head() is not None
    except tierload.StoreNotFound:
        return False


def main(path: str, steps: int) -> None:
    """Train to a step."""
    group = None
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        group = dist.new_group(backend="gloo")  # a save in the background must not speak over the training's group
    app = App()
    if saved(path):
        dcp.load({"app": app}, storage_reader=Reader(path))
        print(f"goes on after step {app.step}")
    pending = None
    while app.step < steps:
        loss = app.train()
        if app.step % 10 == 0:
            if pending is not None:
                pending.result()  # raises what went wrong
            writer = Writer(path, step=app.step, metrics={"loss": loss})
            pending = dcp.async_save({"app": app}, storage_writer=writer, process_group=group)
    if pending is not None:
        pending.result()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
