"""How long a small record takes until it is durable: in each way that Linux has for it, and in a store's journal."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierload import _native
from tierload.engine.machine import file_system
from tierload.engine.store import Store
from tierload.errors import StoreIOError

__all__ = ["RECORD_BYTES", "WAYS", "WayTimes", "facts", "measure"]

RECORD_BYTES = (64, 4096)
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class _Way:
    what: str
    flush: str
    grows: bool = False
    direct: bool = False
    ring: bool = False


# The first is what the others are compared with. The last is not durable: it tells the flush from the write.
_NATIVE_WAYS = {
    "posix": _Way("pwrite, fdatasync", "after"),
    "posix-append": _Way("pwrite, fdatasync, growing file", "after", grows=True),
    "direct-dsync": _Way("pwritev2 RWF_DSYNC, O_DIRECT", "with", direct=True),
    "ring-linked": _Way("io_uring: write, linked fdatasync", "after", ring=True),
    "ring-linked-direct": _Way("io_uring: write, linked fdatasync, O_DIRECT", "after", direct=True, ring=True),
    "ring-direct-dsync": _Way("io_uring: write RWF_DSYNC, O_DIRECT", "with", direct=True, ring=True),
    "write-alone": _Way("pwritev2, O_DIRECT, nothing flushed", "none", direct=True),
}
_STORE = "store-record"
WAYS: Mapping[str, str] = {name: way.what for name, way in _NATIVE_WAYS.items() if way.flush != "none"} | {
    _STORE: "Store.record, in both copies of the journal",
    "write-alone": _NATIVE_WAYS["write-alone"].what,
}

_Writer = Callable[[int], "list[int]"]  # so many records → nanoseconds of each
_Rounds = dict[str, "list[np.ndarray[tuple[int], np.dtype[np.float64]]]"]  # microseconds of each, by way and round


@dataclass(frozen=True, slots=True)
class WayTimes:
    """Microseconds from the call until the record would survive a power cut; None where this way is ``refused``.

    ``ratio`` is the median of the rounds' ratios of means to those of ``posix``.
    """

    way: str
    record_bytes: int
    durable: bool
    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    ratio: float | None = None
    refused: str = ""


def facts(folder: str | os.PathLike[str]) -> tuple[tuple[str, str], ...]:
    """What decides these times, for a person, in the order in which it is shown."""
    kind, device = file_system(folder)
    return (
        ("kernel", os.uname().release),
        ("processor", f"{_processor()}, {len(os.sched_getaffinity(0))} usable"),
        ("load", " ".join(f"{value:.2f}" for value in os.getloadavg())),
        ("file system", f"{kind} on {device}"),
        ("device's cache", _cache(os.stat(folder).st_dev)),
    )


def measure(folder: str | os.PathLike[str], *, records: int = 2000) -> list[WayTimes]:
    """Writes so many records of each of ``RECORD_BYTES`` in each way of ``WAYS``, each way in a file of its own in an
    existing folder, in turn, and removes what it wrote. A way that is refused here is in the result with the reason.

    Raises:
        OSError: Nothing can be written there.
    """
    scratch = Path(tempfile.mkdtemp(prefix=".tierload-bench-", dir=folder))
    try:
        return [row for size in RECORD_BYTES for row in _measure(scratch / str(size), size, records)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measure(folder: Path, size: int, records: int) -> Iterator[WayTimes]:
    folder.mkdir()
    writers: dict[str, _Writer] = {}
    refused: dict[str, str] = {}
    for name, way in _NATIVE_WAYS.items():
        try:
            writer = _native.record_writer(
                str(folder / name),
                flush=way.flush,
                grows=way.grows,
                direct=way.direct,
                ring=way.ring,
                record_bytes=size,
                records=records,
            )
        except StoreIOError as error:
            if name == "posix":
                raise  # nothing could be compared with it
            refused[name] = error.strerror or str(error)
        else:
            writers[name] = writer.write
    with Store(folder / "store", mode="w") as store:
        writers[_STORE] = _store_writer(store, size)
        rounds = _take_turns(writers, records)
    for name in WAYS:
        durable = name != "write-alone"
        if name in refused:
            yield WayTimes(name, size, durable, refused=refused[name])
            continue
        times = np.concatenate(rounds[name])
        ratios = [each.mean() / posix.mean() for each, posix in zip(rounds[name], rounds["posix"], strict=True)]
        p50, p99 = np.percentile(times, [50, 99])
        yield WayTimes(name, size, durable, float(times.mean()), float(p50), float(p99), float(np.median(ratios)))


def _take_turns(writers: Mapping[str, _Writer], records: int) -> _Rounds:
    """Every second round is in the other order."""
    rounds: _Rounds = {name: [] for name in writers}
    many = min(_ROUNDS, records)
    for number in range(many):
        count = records * (number + 1) // many - records * number // many
        for name in list(writers) if number % 2 == 0 else reversed(list(writers)):
            rounds[name].append(np.asarray(writers[name](count), np.float64) / 1e3)
    return rounds


def _store_writer(store: Store, size: int) -> _Writer:
    """Records a text of so many characters under one key, another one each time."""
    number = 0

    def write(count: int) -> list[int]:
        nonlocal number
        times = []
        for _ in range(count):
            number += 1
            value = f"{number:0{size}d}"
            start = time.perf_counter_ns()
            store.record("bench", value)
            times.append(time.perf_counter_ns() - start)
        return times

    write(1)
    return write


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _cache(device: int) -> str:
    """Whether the device under a file system may lose what it has been given, until it is told to flush."""
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = next((path for path in (block / "queue", block.parent / "queue") if path.is_dir()), None)
    if queue is None:
        return "no block device"
    if (queue / "write_cache").read_text().strip() == "write through":
        return "none that could lose a write: no flush is sent"
    fua = (queue / "fua").read_text().strip() == "1"
    return f"volatile; {'a write can be made durable alone (FUA)' if fua else 'every record takes a flush of it'}"
