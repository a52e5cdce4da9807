"""How long a process waits for the disk: its flushes, seen by strace, which stops it at those calls only."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.stage import ROOT

__all__ = ["HAS_STRACE", "apart_from_flushes"]

HAS_STRACE = shutil.which("strace") is not None
# 1234 1796007812.196291 fdatasync(7) = 0 <0.000213>, or only the end of a call that another thread's interrupted
_LINE = re.compile(r"^(\d+) +([\d.]+) (\w+\(|<\.\.\. \w+ resumed>).*<([\d.]+)>$")


def apart_from_flushes(module: str, arguments: Sequence[object], trace: Path) -> list[dict[str, float]]:
    """Runs ``python -m module arguments``, which prints a JSON list of [start, end] in seconds since 1970.

    Returns for each of them ``seconds``, the part of it in which no thread was inside a flush (``rest``), and the
    number of ``flushes``.
    """
    flags = ["-f", "--seccomp-bpf", "-qq", "-ttt", "-T", "-e", "trace=fsync,fdatasync,sync_file_range,syncfs,msync"]
    done = subprocess.run(
        ["strace", *flags, "-o", str(trace), sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    calls = []
    for line in trace.read_text().splitlines():
        found = _LINE.match(line)
        if found:
            at, length = float(found[2]), float(found[4])
            resumed = found[3].startswith("<")  # then ``at`` is when it ended
            calls.append((at - length, at) if resumed else (at, at + length))
    return [_split(start, end, calls) for start, end in json.loads(done.stdout)]


def _split(start: float, end: float, calls: Sequence[tuple[float, float]]) -> dict[str, float]:
    inside = sorted((max(a, start), min(b, end)) for a, b in calls if b > start and a < end)
    waited, until = 0.0, start
    for a, b in inside:  # calls of several threads may overlap
        waited += max(0.0, b - max(a, until))
        until = max(until, b)
    return {"seconds": end - start, "rest": end - start - waited, "flushes": len(inside)}
