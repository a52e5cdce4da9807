"""By how much a process grows while it saves or loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from bench.measuring import Figure, Result
from bench.peaks import KINDS
from bench.stage import ROOT, environment

_MIB = 1 << 20
_HOW = (
    "Each in a process of its own that holds (or loads) a state of 64 float32 tensors, 1 GiB in all: VmHWM of "
    "/proc/self/status, reset through /proc/self/clear_refs, less VmRSS before the call. Imports and a small save and "
    "load come before. A load into new memory has the state itself as well. *Views* are the left halves of tensors "
    "with rows twice as long."
)


def test_peak_memory(benchmark, scale, folder, keep):
    result = Result("memory", "Peak extra memory of the host", _HOW, folder)
    state_mib = scale.of(1024, 16)
    rounds = scale.of(5, 1)
    result.samples = {kind: [] for kind in KINDS}

    def one_round() -> None:
        for kinds in [[kind] for kind in KINDS] if scale.real else [KINDS]:
            command = [sys.executable, "-m", "bench.peaks", str(folder), str(state_mib * _MIB), *kinds]
            done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            for kind, grown in json.loads(done.stdout).items():
                result.samples[kind].append(grown / _MIB)
        shutil.rmtree(folder / "store")
        shutil.rmtree(folder / "views")

    benchmark.pedantic(one_round, rounds=rounds)
    for kind, samples in result.samples.items():
        fresh = kind in ("tierload.load", "torch.load")
        limit = 256.0 + (state_mib if fresh else 0) if kind.startswith("tierload") else None
        note = f"the state has {state_mib:,} MiB" if fresh else ""
        result.add(Figure.of(kind, samples, "MiB", limit=limit, note=note))
    keep(result)
