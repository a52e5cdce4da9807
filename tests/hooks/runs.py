"""Training runs in processes of their own: whole, interrupted, resumed, rolled back; and that their losses agree."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Ended", "assert_same_losses", "roll_back", "train"]

ROOT = Path(__file__).resolve().parents[2]
_ALONE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit status (negative: the signal), the losses it told by step, and all it printed."""

    status: int
    losses: dict[int, str]
    output: str


def train(module: str, *arguments: object, interrupt: str = "", **environment: str) -> Ended:
    """Run ``python -m module arguments`` in a fresh process. ``interrupt`` is ``exception@STEP``, ``sigterm@STEP`` or
    ``kill_in_save@STEP`` (tests/hooks/interrupts.py); without it the run has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | _ALONE | {"INTERRUPT": interrupt} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert interrupt or done.returncode == 0, done.stdout
    told = [line.split("|") for line in done.stdout.splitlines() if line.startswith("loss|")]
    return Ended(done.returncode, {int(step): loss for _, step, loss in told}, done.stdout)


def assert_same_losses(rest: Ended, whole: Ended, *, at_least: int = 20, first: int | None = None) -> None:
    """A resumed run told the losses that the uninterrupted one has, bit for bit, and so many of them. ``first``: its
    first step."""
    assert len(rest.losses) >= at_least, rest.output
    assert first is None or min(rest.losses) == first, rest.output
    assert rest.losses == {step: whole.losses[step] for step in rest.losses}, rest.output


def roll_back(store: Path, steps: int) -> None:
    """``tierload rollback STORE --steps N``, as a person does it."""
    command = [sys.executable, "-m", "tierload", "rollback", str(store), "--steps", str(steps), "--yes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
