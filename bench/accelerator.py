"""Where the benchmarks of an accelerator run, its clock, the memory that a call takes there and here, and the ceilings
of the machine in the same run. At toy size everything is on the CPU, where the device's clock is the processor's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench.conftest import Scale
from tierload.engine import devices

__all__ = ["Mark", "Peaks", "device_for", "direct_rates", "host_to_device", "page_cache", "synchronize"]

_BLOCK_BYTES = 16 << 20  # of a read from the page cache
_LOOK_SECONDS = 0.01


def device_for(scale: Scale) -> str:
    """Skips a real run where there is no CUDA device: it would measure another machine."""
    if not scale.real:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device at full size")
    return "cuda"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Mark:
    """A point of the current stream; ``a.until(b)`` are the seconds of the device between two, once both are past."""

    def __init__(self, device: str) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def until(self, other: Mark) -> float:
        if self._event is None or other._event is None:
            return other._at - self._at
        other._event.synchronize()
        return self._event.elapsed_time(other._event) / 1e3


class Peaks:
    """By how many bytes the memory in use grew at the most inside of ``with``, of the whole machine and device: a look
    every 10 ms, and torch's own peak.

    ``host`` is what was anonymous or pinned (MemTotal less MemAvailable, so without the page cache), by whatever call;
    ``device`` what the driver or torch's allocator gave. Others on the machine count too.
    """

    def __init__(self, device: str) -> None:
        self.host = self.device = 0
        self._cuda = device == "cuda"
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peaks:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()
        self._before = self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._note()
        if self._cuda:
            self.device = max(self.device, torch.cuda.max_memory_allocated() - self._allocated)

    def _watch(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            self._note()

    def _note(self) -> None:
        host, device = self._look()
        self.host = max(self.host, host - self._before[0])
        self.device = max(self.device, device - self._before[1])

    def _look(self) -> tuple[int, int]:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
        if not self._cuda:
            return total - available, 0
        free, whole = torch.cuda.mem_get_info()
        return total - available, whole - free


def direct_rates(folder: Path, scale: Scale) -> tuple[float, float]:
    """Bytes a second that the disk under ``folder`` takes until they are durable, and gives, past the page cache: the
    best way that tierload's calibration finds in a second. It is remembered, so that no save has to measure. Not
    measured at toy size."""
    if not scale.real:
        return 1e9, 1e9
    rates = devices.measure(folder)
    devices.remember(folder, rates)
    direct = [rate for rate in rates if rate.direct] or rates  # a file system may have no other way
    return max(rate.write for rate in direct), max(rate.read for rate in direct)


def page_cache(files: Sequence[Path], threads: int, *, pinned: bool) -> Callable[[], float]:
    """Reads what is cached into memory by so many threads with a block each; bytes a second."""
    blocks = [torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(threads)]
    views = [memoryview(block.numpy()) for block in blocks]
    sizes = {file: file.stat().st_size for file in files}
    calls = [(file, at) for file, size in sizes.items() for at in range(0, size, _BLOCK_BYTES)]

    def read(number: int) -> None:
        descriptors = {file: os.open(file, os.O_RDONLY) for file in files}
        for file, at in calls[number::threads]:
            os.preadv(descriptors[file], [views[number]], at)
        for descriptor in descriptors.values():
            os.close(descriptor)

    def run() -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
        return sum(sizes.values()) / (time.perf_counter() - start)

    return run


def host_to_device(nbytes: int, device: str) -> Callable[[], float]:
    """Copies pinned memory to the device; bytes a second."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, device=device)

    def run() -> float:
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        return nbytes / (time.perf_counter() - start)

    return run
