"""Trainings that are interrupted and go on in fresh processes: every loss is the uninterrupted one's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hooks.runs import Ended, assert_same_losses, roll_back, train

SCRIPT = "tests.hooks.transformers.training"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(SCRIPT, tmp_path_factory.mktemp("whole") / "store", "callback")


@pytest.mark.parametrize(
    ("interrupt", "first"),
    [
        ("exception@8", 7),  # after the commit of step 6, in the middle of an epoch
        pytest.param("sigterm@9", 10, marks=pytest.mark.slow),  # right after step 9 was saved: it is finished first
        ("kill_in_save@9", 7),  # the commit of step 9 does not come to be
    ],
)
def test_goes_on_where_it_was_interrupted(whole: Ended, tmp_path: Path, interrupt: str, first: int) -> None:
    ended = train(SCRIPT, tmp_path / "store", "callback", interrupt=interrupt)
    assert ended.status != 0
    assert_same_losses(train(SCRIPT, tmp_path / "store", "callback"), whole, first=first)


def test_goes_on_from_two_commits_before(whole: Ended, tmp_path: Path) -> None:
    """By the mixin, with transformers' own way to say it; the SIGTERM comes while step 9 is being saved."""
    ended = train(SCRIPT, tmp_path / "store", "mixin", interrupt="sigterm@9")
    assert ended.status < 0
    roll_back(tmp_path / "store", 2)
    assert_same_losses(train(SCRIPT, tmp_path / "store", "mixin"), whole, first=4)
