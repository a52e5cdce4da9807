"""What others do with the same state on a device: saves until they are durable, each as its users call it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bench.llama import Training
from bench.measuring import fsync_folder
from bench.versus import torch_save_durably

__all__ = ["SAVES", "Pinned", "Seconds", "safetensors_durably"]


@dataclass(frozen=True)
class Seconds:
    """From the call: until it returned, until the state might change, until it was durable."""

    call: float
    staged: float
    durable: float

    @classmethod
    def of(cls, save: Callable[[], object]) -> Seconds:
        """One that does everything in its call."""
        start = time.perf_counter()
        save()
        seconds = time.perf_counter() - start
        return cls(seconds, seconds, seconds)


def safetensors_durably(run: Training, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    save_file(run.named_tensors(), temporary)
    descriptor = os.open(temporary, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    temporary.rename(path)
    fsync_folder(path.parent)


def _dcp_default(run: Training, path: Path) -> Seconds:
    start = time.perf_counter()
    future = dcp.async_save(run.plain(), checkpoint_id=path)
    called = time.perf_counter() - start
    future.result()  # type: ignore[union-attr]  # its writer has synced its files
    return Seconds(called, called, time.perf_counter() - start)


class Pinned:
    """``async_save`` with a stager that keeps pinned memory for the whole state, which it makes at its first save, and
    copies into it beside the caller. Its writer syncs its files."""

    def __init__(self) -> None:
        on = torch.cuda.is_available()
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=on
            )
        )

    def __call__(self, run: Training, path: Path) -> Seconds:
        start = time.perf_counter()
        response = dcp.async_save(run.plain(), checkpoint_id=path, async_stager=self.stager)
        called = time.perf_counter() - start
        response.staging_completion.result()  # type: ignore[union-attr]
        staged = time.perf_counter() - start
        response.upload_completion.result()  # type: ignore[union-attr]
        return Seconds(called, staged, time.perf_counter() - start)

    def close(self) -> None:
        self.stager.close()


SAVES: dict[str, Callable[[Training, Path], Seconds]] = {
    "torch.save": lambda run, path: Seconds.of(lambda: torch_save_durably(run.plain(), path)),
    "safetensors": lambda run, path: Seconds.of(lambda: safetensors_durably(run, path)),
    "DCP async_save": _dcp_default,
}
