"""B84: train, interrupt, resume in a fresh process: the next losses are those of a run that was never interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tierload
from tests.hooks.runs import ROOT, Ended, assert_same_losses, roll_back, train
from tests.hooks.session.toys import saved

SCRIPT = "tests.hooks.session.script"
STEPS = 60


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(SCRIPT, tmp_path_factory.mktemp("whole") / "run", STEPS + 10)


@pytest.mark.parametrize(
    ("interrupt", "status", "newest"),
    [
        pytest.param("exception@33", 1, 30, marks=pytest.mark.slow),  # half a step is no commit
        ("sigterm@33", 128 + signal.SIGTERM, 33),
        ("kill_in_save@35", -signal.SIGKILL, 30),
    ],
)
def test_a_run_goes_on_where_it_was(tmp_path: Path, whole: Ended, interrupt: str, status: int, newest: int) -> None:
    store = tmp_path / "run"
    ended = train(SCRIPT, store, STEPS, interrupt=interrupt)
    assert ended.status == status, ended.output
    assert saved(store)[-1] == newest
    assert_same_losses(ended, whole)
    rest = train(SCRIPT, store, STEPS)
    assert_same_losses(rest, whole, first=newest + 1)
    if "sigterm" in interrupt:
        assert "SIGTERM: saving step 33" in ended.output
        assert saved(store) == [45, 50, 55, 60]
        roll_back(store, 2)
        assert_same_losses(train(SCRIPT, store, STEPS + 10), whole, first=51)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_comes_to_its_end(tmp_path: Path, whole: Ended) -> None:
    chance, store = random.Random(5), tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "-m", SCRIPT, str(store), str(STEPS)]
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) * 4:
        told: dict[int, str] = {}
        with subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=-1, stderr=-3, text=True
        ) as process:
            assert process.stdout is not None
            left = chance.randrange(1, 15)
            for line in process.stdout:
                _, step, loss = line.strip().split("|") if line.endswith("\n") else ("", 0, "")
                if loss:
                    told[int(step)] = loss
                if len(told) == left:
                    process.send_signal(number)
        assert told == {step: whole.losses[step] for step in told}, "what was done again is the same"
        with tierload.open(store) as opened:
            assert opened.verify(full=True).ok
    assert_same_losses(train(SCRIPT, store, STEPS), whole, at_least=0)
    assert saved(store)[-1] == STEPS
