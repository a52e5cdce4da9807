"""Training loops whose steps are what a benchmark needs: a state of a given size, and work on so many cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

__all__ = ["Loop", "dcp_async_save", "free_cores", "linear_layers", "work"]


class Loop:
    """A model with its AdamW, ``nbytes`` of float32 in all: weights and both moments, as after the first step."""

    def __init__(self, nbytes: int, tensors: int = 32, seed: int = 0) -> None:
        items = nbytes // (12 * tensors)
        generator = torch.Generator().manual_seed(seed)
        parameters = [
            torch.nn.Parameter(torch.empty(items).normal_(0, 0.02, generator=generator)) for _ in range(tensors)
        ]
        self.model = torch.nn.ParameterList(parameters)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        for parameter in parameters:
            parameter.grad = torch.empty(items).normal_(0, 1e-3, generator=generator)
        self.optimizer.step()
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def plain(self) -> dict[str, object]:
        """The same state as torch.distributed.checkpoint takes it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": 0}


def linear_layers(count: int, width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of square layers without bias, and its AdamW after a step: four tensors a layer."""
    model = torch.nn.ModuleDict({f"layer{n}": torch.nn.Linear(width, width, bias=False) for n in range(count)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def dcp_async_save(state: dict[str, object], path: Path) -> Future[object]:
    """``torch.distributed.checkpoint.async_save`` as it is by default, without a process group."""
    return dcp.async_save(state, checkpoint_id=path)  # type: ignore[return-value]


def work(seconds: float, threads: int) -> Callable[[], None]:
    """A forward and backward pass of about ``seconds`` on so many threads: as many products of matrices as that takes
    when nothing else runs. With 0 threads it only waits, as for an accelerator."""
    if threads == 0:
        return lambda: time.sleep(seconds)
    a, b = torch.randn(384, 384), torch.randn(384, 384)

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    with _torch_threads(threads):
        run(20)
        start = time.perf_counter()
        run(100)
        count = max(1, round(seconds / ((time.perf_counter() - start) / 100)))

    def timed() -> None:
        with _torch_threads(threads):
            run(count)

    return timed


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def free_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
