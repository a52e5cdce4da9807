"""A small model, and every way in which torch wraps one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """Layers of one shape, buffers, a tied weight, and a submodule whose name is that of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.module = nn.BatchNorm1d(4).eval()  # what is computed twice would be counted twice
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.module(x))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def layers(wrap: Wrap) -> Wrap:
    def wrapped(model: nn.Module) -> nn.Module:
        for number, layer in enumerate(model.layers):
            model.layers[number] = wrap(layer)
        return model

    return wrapped


WAYS: dict[str, Wrap] = {
    "bare": lambda model: model,
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compiled": compiled,
    "ddp of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "compiled ddp": lambda model: compiled(DistributedDataParallel(model)),
    "compiled layers": layers(compiled),
    "checkpointed": checkpoint_wrapper,
    "checkpointed layers": layers(checkpoint_wrapper),
    "checkpointed compiled layers": layers(lambda layer: checkpoint_wrapper(compiled(layer))),
    "compiled checkpointed layers": layers(lambda layer: compiled(checkpoint_wrapper(layer))),
    "ddp of checkpointed layers": lambda model: DistributedDataParallel(layers(checkpoint_wrapper)(model)),
    "fsdp1 layers": layers(fsdp1),
}
