"""B84: train, interrupt, resume in a fresh process: the next losses are those of a run that was never interrupted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import tierload
from tests.hooks.runs import Ended, assert_same_losses, roll_back, train

SCRIPT = "tests.hooks.session.script"
STEPS = 60


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(SCRIPT, tmp_path_factory.mktemp("whole") / "run", STEPS)


def steps(store: Path) -> list[int | None]:
    with tierload.open(store) as opened:
        return [commit.step for commit in opened.commits() if not commit.superseded]


@pytest.mark.parametrize(
    ("interrupt", "status", "newest"),
    [
        ("exception@33", 1, 30),  # half a step is no commit
        ("sigterm@33", 128 + signal.SIGTERM, 33),
        ("kill_in_save@35", -signal.SIGKILL, 30),
    ],
)
def test_a_run_goes_on_where_it_was(tmp_path: Path, whole: Ended, interrupt: str, status: int, newest: int) -> None:
    store = tmp_path / "run"
    ended = train(SCRIPT, store, STEPS, interrupt=interrupt)
    assert ended.status == status, ended.output
    assert steps(store)[0] == newest
    assert_same_losses(ended, whole)
    rest = train(SCRIPT, store, STEPS)
    assert_same_losses(rest, whole, first=newest + 1)
    if "sigterm" in interrupt:
        assert "SIGTERM: saving step 33" in ended.output
        assert steps(store) == [60, 55, 50, 45]
        roll_back(store, 2)
        assert_same_losses(train(SCRIPT, store, STEPS), whole, first=51, at_least=10)
