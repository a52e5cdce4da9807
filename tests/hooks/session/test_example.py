"""docs/examples/plain_loop.py does what its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hooks.runs import ROOT, roll_back


def run(store: Path, steps: int) -> list[str]:
    example = ROOT / "docs/examples/plain_loop.py"
    command = [sys.executable, "-W", "ignore", example, store, "--steps", str(steps), "--every", "10"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    first = run(tmp_path / "run", 30)
    assert first[0] == "a new run"
    roll_back(tmp_path / "run", 2)
    again = run(tmp_path / "run", 30)
    assert again == ["resumed from step 10", *first[2:]]
