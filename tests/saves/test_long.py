"""Hundreds of saves in one process: nothing piles up."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tierload
from tests.cases.children import ROOT

SMALL, LARGE = 500_000, 10_000_000
"""Floats of a state: 2 MB, 40 MB."""


def run(store: Path, saves: int, floats: int, guarded: bool) -> list[dict[str, int]]:
    """What a process held after every tenth save, but for the first twenty."""
    command = [sys.executable, "-m", "tests.saves.script_long", str(store), str(saves), str(floats), str(guarded)]
    # Every free() gives memory back, so that what stays is what is held.
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=500, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    return [each for each in json.loads(done.stdout) if each["step"] > 20]


def check(seen: list[dict[str, int]], floats: int) -> None:
    for name in ("files", "threads", "python_threads", "locked", "shared"):
        found = [each[name] for each in seen]
        half = len(found) // 2
        assert np.median(found[half:]) <= np.median(found[:half]), (name, found)  # a file may be open for a moment
    state_kib = floats * 4 / 1024
    steps, rss = (np.array([each[name] for each in seen], float) for name in ("step", "rss"))
    slope = np.polyfit(steps, rss, 1)[0]
    assert slope < state_kib / 50, f"{slope:.1f} KiB a save, of states of {state_kib:.0f} KiB: {rss}"
    for name, bound in (("maps", 40), ("size", 64 << 10)):  # a thread that nobody joined has 8 MiB in two maps
        found = [each[name] for each in seen]
        assert found[-1] - found[0] < bound, (name, found)


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_b14_hundreds_of_saves(store: Path, guarded: bool) -> None:
    check(run(store, 500, SMALL, guarded), SMALL)


@pytest.mark.slow
def test_b14_thousands_of_saves(store: Path) -> None:
    check(run(store, 5000, SMALL, True), SMALL // 10)


@pytest.mark.slow
def test_b14_saves_of_a_larger_state(store: Path) -> None:
    check(run(store, 60, LARGE, True), LARGE)


def test_a_closed_store_keeps_no_memory(store: Path) -> None:
    """Whoever keeps it, and without a collection."""
    large = {"w": torch.zeros(64 << 20, dtype=torch.uint8)}
    gc.disable()
    try:
        kept = []
        for number in range(3):
            opened = tierload.Store(store, mode="w")
            opened.async_save(large).result()
            opened.close()
            kept.append(opened)
            if number == 0:
                first = _resident()
        assert _resident() - first < 64 << 20
    finally:
        gc.enable()


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
