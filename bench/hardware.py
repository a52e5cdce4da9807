"""What a figure was measured on: figures without it mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import torch

import tierload

__all__ = ["cores", "describe"]


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def describe(folder: Path) -> dict[str, object]:
    """The machine, its load as the measurement begins, the file system under ``folder``, and the versions.

    ``gpu`` and ``kvikio`` are only there where there is a GPU.
    """
    return {
        "cpu": _cpu(),
        "cores": cores(),
        **(_accelerator() if torch.cuda.is_available() else {}),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tierload": _version(),
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
    }


def _accelerator() -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    gds = "with" if Path("/proc/driver/nvidia-fs").exists() else "without"
    try:
        kvikio = metadata.version("kvikio-cu13")
    except metadata.PackageNotFoundError:
        kvikio = "none"
    return {
        "gpu": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, driver {driver}, {gds} nvidia-fs",
        "kvikio": kvikio,
    }


def _version() -> str:
    """The release, and the commit: BENCH_COMMIT says of which one an installed wheel is (tests/gpu/run.sh), else it is
    that of the checkout; a plus when files differ from it."""
    flags = ["--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(["git", "describe", *flags], cwd=Path(__file__).parent, capture_output=True, text=True)
    commit = os.environ.get("BENCH_COMMIT") or (done.stdout.strip() if done.returncode == 0 else "")
    return tierload.__version__ + (f" ({commit})" if commit else "")


def _cpu() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    if "model" in fields:
        name += f", family {fields.get('cpu family')} model {fields['model']} stepping {fields.get('stepping')}"
    simd = [flag for flag in ("avx2", "avx512f", "amx_tile") if flag in fields.get("flags", "").split()]
    return ", ".join([name, *simd])


def _file_system(folder: Path) -> str:
    """Type, device and options of the mount that holds ``folder``: the one with the longest path above it."""
    best: tuple[str, ...] = ("", "", "unknown", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point, kind, options = line.split()[:4]
        inside = folder.resolve().is_relative_to(point)
        if inside and len(point) >= len(best[1]):
            best = (device, point, kind, options)
    return f"{best[2]} on {best[0]} ({best[3]})"
