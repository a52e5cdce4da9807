"""What a machine and one of its file systems offer a store, and what a save and a load really do there."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tierload import _native
from tierload.engine import devices
from tierload.engine.store import Store
from tierload.gds import Choice, ProbeResult, choose, facts
from tierload.gds.probe import probe

__all__ = ["Machine", "examine", "file_system"]

_STATE_BYTES = 192 << 20  # of the state that is saved and loaded: enough for a rate, little enough for any disk
_TENSORS = 24


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts for a person, in the order in which they are shown, and rates in bytes a second.

    ``ways`` are the device's own, by name: written until durable, read from the device. ``save`` and ``load`` are those
    of a state that was really saved and loaded, raw bytes counted, ``io`` and ``compression`` the way that it took.
    ``direct`` is what kvikio did between the file system and a GPU, and ``gpu`` the way that a GPU's tensors take by
    that; None without a GPU.
    """

    facts: tuple[tuple[str, str], ...]
    ways: tuple[tuple[str, float, float], ...]
    io: str
    compression: str
    save: float
    load: float
    direct: ProbeResult | None
    gpu: Choice | None

    @property
    def write_ceiling(self) -> float:
        """The fastest that anything was written here."""
        return max(write for _, write, _ in self.ways)

    @property
    def read_ceiling(self) -> float:
        """The fastest that anything was read here."""
        return max(read for _, _, read in self.ways)


def examine(folder: str | os.PathLike[str]) -> Machine:
    """Looks at the machine and at the file system of an existing folder: writes and reads there for some seconds, and
    removes what it wrote.

    Raises:
        OSError: Nothing can be written there.
    """
    rates = devices.measure(folder)
    device = devices.remember(folder, rates)
    ways = tuple((_way(rate), rate.write, rate.read) for rate in rates)
    scratch = Path(tempfile.mkdtemp(prefix=".tierload-doctor-", dir=folder))
    try:
        io, compression, save, load = _try(scratch / "store")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    direct = devices.remember_way(folder, probe(folder)) if torch.cuda.is_available() else None
    # The ring is as fast as the device is: PCIe is faster.
    gpu = choose(direct, device.write, device.read) if direct is not None else None
    return Machine((*_facts(folder, io), *_gds(direct)), ways, io, compression, save, load, direct, gpu)


def _way(rate: _native.DeviceRate) -> str:
    return f"io_uring, {rate.depth} at a time, {rate.block_bytes >> 20} MiB each" if rate.direct else "page cache"


def _try(path: Path) -> tuple[str, str, float, float]:
    """Saves and loads normally distributed weights once, cold."""
    generator = torch.Generator().manual_seed(0)
    items = _STATE_BYTES // _TENSORS // 4
    state = {str(number): torch.randn(items, generator=generator) for number in range(_TENSORS)}
    with Store(path, mode="w") as store:
        report = store.save(state)
        for segment in (path / "seg").iterdir():
            with segment.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        store.load(into=state)
        load = _STATE_BYTES / (time.perf_counter() - start)
        return store.io, report.compression, _STATE_BYTES / report.seconds, load


def _facts(folder: str | os.PathLike[str], io: str) -> tuple[tuple[str, str], ...]:
    kind, device = file_system(folder)
    disk = shutil.disk_usage(folder)
    return (
        ("kernel", os.uname().release),
        ("processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable; {_simd()}"),
        ("NUMA nodes", str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1)),
        ("memory", _memory()),
        ("locked memory", _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])),
        ("file system", f"{kind} on {device}"),
        ("free space", f"{disk.free / 1e9:,.1f} of {disk.total / 1e9:,.1f} GB"),
        ("io_uring", _native.io_uring_refusal() or "works"),
        ("direct I/O", "works" if io == "direct" else io.removeprefix("buffered: ")),
    )


def file_system(folder: str | os.PathLike[str]) -> tuple[str, str]:
    """Type and source of the mount that a folder is on."""
    number = os.stat(folder).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            kind, source, *_ = rest.split()
            return kind, source
    return "unknown", wanted


def _simd() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split())
            found = [name for name in ("avx2", "avx512f", "asimd") if name in flags]
            return ", ".join(found) or "no wide vectors"
    return "unknown"


def _memory() -> str:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    values = {line[0].rstrip(":"): int(line[1]) for line in lines}
    transparent = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = transparent.read_text().partition("[")[2].partition("]")[0] if transparent.exists() else "absent"
    return (
        f"{values['MemAvailable'] / 1e6:,.1f} of {values['MemTotal'] / 1e6:,.1f} GB available; huge pages: "
        f"{values.get('HugePages_Total', 0)} reserved, transparent ones {chosen}"
    )


def _limit(count: int) -> str:
    return "unlimited" if count == resource.RLIM_INFINITY else f"{count / 1e6:,.1f} MB"


def _gds(direct: ProbeResult | None) -> tuple[tuple[str, str], ...]:
    if direct is None:
        return (("GPUDirect Storage", "no GPU here"),)
    return (("GPUDirect Storage", direct.path or direct.why), *facts())
