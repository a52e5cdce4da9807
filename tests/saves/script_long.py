"""Many saves in one process: python -m tests.saves.script_long STORE SAVES FLOATS GUARDED; prints what it holds."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import tierload
from tierload import Settings


def status(name: str) -> int:
    """A figure of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def holdings(store: Path) -> dict[str, int]:
    """What a process can leak, but for what lies in the store's folder."""
    shared = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    return {
        "rss": status("VmRSS") - status("RssShmem"),
        "size": status("VmSize"),
        "locked": status("VmLck"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "shared": len(shared),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def main(path: Path, saves: int, floats: int, guarded: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    gc.disable()  # as training loops do: what a save leaves must not need a collection
    settings = Settings(page_bytes=16384, pack_below_bytes=1024, threads=2, max_segment_size_mb=8)
    parameters = [torch.nn.Parameter(torch.rand(floats // 20)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    if guarded:
        assert not tierload.guard(optimizer).reason
    seen = []
    for step in range(saves):
        optimizer.step()
        pending = tierload.async_save({"w": list(parameters), "step": step}, path, step=step, settings=settings)
        optimizer.step()
        if step % 7 == 0:
            pending.result()
        if step % 20 == 19:
            tierload.open(path, mode="w").collect(keep=2)
        if step % 10 == 9:
            pending.durable()
            seen.append({"step": step} | holdings(path))
    tierload.open(path, mode="w").close()
    return seen


if __name__ == "__main__":
    store, saves, floats, guarded = sys.argv[1:]
    print(json.dumps(main(Path(store), int(saves), int(floats), guarded == "True")))
