"""How fast the device under a directory is, and kvikio on it: tried once, and remembered for each device."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tierload import _native, gds

__all__ = [
    "UNKNOWN",
    "Device",
    "calibrate",
    "measure",
    "remember",
    "remember_way",
    "remembered",
    "remembered_way",
]

_SECONDS = 1.0
_BLOCK_BYTES, _DEPTH = 1 << 20, 8  # good on most devices


@dataclass(frozen=True, slots=True)
class Device:
    """The best way to move data to a device and back. Rates are bytes a second, until durable and from the device;
    0 from it where nobody has measured. ``block_bytes`` and ``depth`` are the size and number of transfers on their way
    past the page cache."""

    write: float
    read: float
    block_bytes: int = _BLOCK_BYTES
    depth: int = _DEPTH

    def sensible(self) -> bool:
        """Whether a measurement can have given this: what comes out of a file may be anything."""
        whole = isinstance(self.block_bytes, int) and isinstance(self.depth, int)
        ways = 4096 <= self.block_bytes <= 1 << 26 and self.block_bytes % 4096 == 0 and 1 <= self.depth <= 64
        return whole and ways and 0 < self.write < math.inf and 0 < self.read < math.inf


UNKNOWN = Device(1e9, 0.0)  # what a device is taken for until it was measured
_MEMORY = Device(math.inf, math.inf)


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierload" / "devices.json"


def _name(path: str | os.PathLike[str]) -> str:
    """What tells devices apart: the file system's number, which names a partition, an image or a mount."""
    number = os.stat(path).st_dev
    return f"{os.uname().nodename} {os.major(number)}:{os.minor(number)}"


def _known() -> dict[str, object]:
    try:
        found = json.loads(_memory().read_text())
    except (OSError, ValueError):
        return {}  # it is only a memory: what is lost is measured again
    return found if isinstance(found, dict) else {}


def remembered(path: str | os.PathLike[str]) -> Device | None:
    """What was measured on the device of a directory, or None. Memory is no device, and faster than any encoder."""
    if not os.path.isdir(path):
        return None
    if _native.in_memory(os.fspath(path)):
        return _MEMORY
    found = _known().get(_name(path))
    try:
        device = Device(**found) if isinstance(found, dict) else None
        return device if device is not None and device.sensible() else None
    except TypeError:
        return None  # another release wrote it, or somebody else


def measure(path: str | os.PathLike[str]) -> list[_native.DeviceRate]:
    """Writes and reads in a directory for about a second, in each way that works there; leaves nothing behind.

    Raises:
        OSError: Nothing can be written there.
    """
    scratch = tempfile.mkdtemp(prefix=".tierload-calibration-", dir=path)
    try:
        return _native.calibrate(scratch, _SECONDS)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def calibrate(path: str | os.PathLike[str]) -> Device:
    """Measures the device of a directory, and remembers the result."""
    return remember(path, measure(path))


def remember(path: str | os.PathLike[str], rates: Sequence[_native.DeviceRate]) -> Device:
    """Keeps what was measured for the next process."""
    direct = max((rate for rate in rates if rate.direct), key=lambda rate: rate.write, default=None)
    device = Device(
        write=max(rate.write for rate in rates),
        read=max(rate.read for rate in rates),
        block_bytes=direct.block_bytes if direct else _BLOCK_BYTES,
        depth=direct.depth if direct else _DEPTH,
    )
    _keep(_name(path), asdict(device))
    return device


def remembered_way(path: str | os.PathLike[str]) -> gds.ProbeResult | None:
    """What kvikio did between the file system of a directory and a GPU, or None where nobody has tried."""
    return gds.ProbeResult.of(_known().get(_way(path)))


def remember_way(path: str | os.PathLike[str], found: gds.ProbeResult) -> gds.ProbeResult:
    """Keeps what a probe has found for the next process, unless it failed for a reason that passes."""
    if not found.again:
        _keep(_way(path), asdict(found))
    return found


def _way(path: str | os.PathLike[str]) -> str:
    """A file system, a kvikio, and what is in its way: a driver that has been loaded since is tried."""
    return f"{_name(path)} kvikio {gds.version()}, {gds.refusal() or 'direct'}"


def _keep(name: str, value: dict[str, object]) -> None:
    memory = _memory()
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        known = _known() | {name: value}
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(known, file, indent=1)
        os.replace(file.name, memory)
    except OSError:
        pass  # no home to write to: the next process measures again
