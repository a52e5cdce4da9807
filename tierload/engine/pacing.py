"""What the size of a segment, or a bound on its time, costs: latency until durable against bandwidth."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tierload.engine import devices
from tierload.engine.saving import Draft, Effort, Saved, page_set
from tierload.engine.store import Store
from tierload.errors import StoreIOError
from tierload.layout import plan_pages
from tierload.settings import Settings
from tierload.state import flatten
from tierload.types import FlatState

__all__ = ["DEFAULT_BYTES", "INTERVALS_MS", "SEGMENT_MIB", "LatencyShare", "Tradeoff", "bytes_that_fit", "measure"]

SEGMENT_MIB = (1, 2, 4, 8, 16, 32, 64, 128, 256)
INTERVALS_MS = (20, 50, 100, 250)
_INTERVALS_AT_MIB = 128
DEFAULT_BYTES = 512 << 20
_LEAST_BYTES = 1 << 20
_SPARE = 64 << 20  # for the calibration, manifests and journals


@dataclass(frozen=True, slots=True)
class LatencyShare:
    """One way: a size of segments in MiB, and a bound in milliseconds (0: none).

    Latencies are milliseconds from a segment's first byte until it was durable, over ``segments`` of all rounds.
    ``rate`` is bytes a second of whole saves, commits included; ``share`` is its part of the best rate of the run.
    """

    segment_mib: int
    interval_ms: int
    segments: int
    mean: float
    p99: float
    max: float
    late: int
    rate: float
    share: float


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A whole run. ``device`` is the calibrated raw rate of writes and ``best`` what 100% is, in bytes a second."""

    device: float
    best: float
    sizes: tuple[LatencyShare, ...]
    intervals: tuple[LatencyShare, ...]


@dataclass(slots=True)
class _Way:
    segment_mib: int
    interval_ms: int = 0
    latencies: list[float] = field(default_factory=list)
    late: int = 0
    written: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.written / self.seconds

    def add(self, saved: Saved, seconds: float) -> None:
        self.latencies += saved.latencies_ms
        self.late += saved.pacing.late_segments
        self.written += saved.written_bytes
        self.seconds += seconds


def bytes_that_fit(folder: str | os.PathLike[str], wanted: int | None = None) -> int:
    """How many bytes each save of a run in a folder writes: ``wanted``, or without it ``DEFAULT_BYTES``, or half of
    what is free when that is less.

    Raises:
        StoreIOError: So many do not fit.
    """
    free = shutil.disk_usage(folder).free
    count = wanted if wanted is not None else min(DEFAULT_BYTES, free // 2 >> 20 << 20)
    needed = max(count, _LEAST_BYTES) + _SPARE
    if free < needed:
        raise StoreIOError(
            errno.ENOSPC,
            f"a run with saves of {max(count, _LEAST_BYTES):,} bytes needs {needed:,} free, and {free:,} are; free "
            f"some space, or ask for less with --bytes",
            os.fspath(folder),
        )
    return count


def measure(
    folder: str | os.PathLike[str],
    *,
    nbytes: int,
    rounds: int = 3,
    sizes: Sequence[int] = SEGMENT_MIB,
    intervals: Sequence[int] = INTERVALS_MS,
    progress: Callable[[int], None] | None = None,
) -> Tradeoff:
    """Saves ``nbytes`` of incompressible numbers so many times in each way, in turn, each time into a new store in an
    existing folder, and removes what it wrote. ``progress`` gets the bytes of every save that is done.

    Raises:
        OSError: Nothing can be written there, or the disk is full.
    """
    numbers = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    flat = flatten({"numbers": numbers})
    by_size = [_Way(size) for size in sizes]
    by_interval = [_Way(_INTERVALS_AT_MIB, interval) for interval in intervals]
    ways = [*by_size, *by_interval]
    scratch = Path(tempfile.mkdtemp(prefix=".tierload-bench-", dir=folder))
    try:
        device = max(rate.write for rate in devices.measure(scratch))
        _save(scratch / "store", flat, ways[0])  # nobody's: the first one finds buffers and caches cold
        shutil.rmtree(scratch / "store")
        for number in range(rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                way.add(*_save(scratch / "store", flat, way))
                shutil.rmtree(scratch / "store")
                if progress is not None:
                    progress(nbytes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    best = max(device, *(way.rate for way in ways))
    return Tradeoff(
        device, best, tuple(_result(way, best) for way in by_size), tuple(_result(way, best) for way in by_interval)
    )


def _save(path: Path, flat: FlatState, way: _Way) -> tuple[Saved, float]:
    settings = Settings(compression="off", max_segment_size_mb=way.segment_mib, flush_interval_ms=way.interval_ms)
    plan = plan_pages(flat, settings.page_bytes, settings.pack_below_bytes)
    draft = Draft(flat, plan, page_set(plan), step=None, meta={}, tags=())
    with Store(path, mode="w", settings=settings) as store:
        start = time.perf_counter()
        return store.write_draft(draft, Effort(began=start), settings), time.perf_counter() - start


def _result(way: _Way, best: float) -> LatencyShare:
    return LatencyShare(
        segment_mib=way.segment_mib,
        interval_ms=way.interval_ms,
        segments=len(way.latencies),
        mean=float(np.mean(way.latencies)),
        p99=float(np.percentile(way.latencies, 99)),
        max=max(way.latencies),
        late=way.late,
        rate=way.rate,
        share=way.rate / best,
    )
