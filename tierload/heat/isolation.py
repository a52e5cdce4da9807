"""What is computed beside a training, as if it never was: random numbers, buffers, modes and gradients stay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

__all__ = ["same_random_numbers", "undisturbed"]


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """In it the model is in evaluation mode (no dropout, BatchNorm by its running averages), in the parameters' own
    precision, and without gradients; after it everything is as before, bit for bit.

    A buffer that changes inside is copied back, so that whoever keeps a graph over it is told by autograd.
    """
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = _Buffers(model)
    devices = {parameter.device.type for parameter in gradients}
    with ExitStack() as stack:
        stack.enter_context(same_random_numbers(model))
        stack.enter_context(torch.enable_grad())
        for kind in devices:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            model.eval()
            for parameter in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            for module, mode in modes.items():
                module.training = mode
            buffers.put_back()


@contextmanager
def same_random_numbers(model: torch.nn.Module) -> Iterator[None]:
    """What is drawn in it from the process's own generators is drawn again after it."""
    own, arrays = random.getstate(), np.random.get_state()
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)


class _Buffers:
    """The buffers of a model, and copies of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._saved = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        for module, name, buffer, version, copy in self._saved:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(copy)
            module._buffers[name] = buffer
