"""The example, as it is: alone, and by torchrun on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tierload
from tests.hooks.runs import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "distributed_checkpoint.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_example_goes_on_with_more_ranks(tmp_path: Path) -> None:
    tierload.open(tmp_path / "toy", mode="w").close()  # as a run leaves it that was killed in its first save
    assert "goes on" not in run(EXAMPLE, tmp_path / "toy", 20)
    assert run(*TORCHRUN, EXAMPLE, tmp_path / "toy", 40).count("goes on after step 20") == 2
    with tierload.open(tmp_path / "toy") as store:
        assert [(commit.step, commit.ranks) for commit in store.commits()] == [(40, 2), (30, 2), (20, 1), (10, 1)]
        losses = [commit.metrics["loss"] for commit in store.commits()]
    assert losses == sorted(losses)
