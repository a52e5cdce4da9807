"""Trainings that are interrupted and go on in fresh processes: every loss is the uninterrupted one's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierload
from tests.hooks.runs import Ended, assert_same_losses, roll_back, train

SCRIPT = "tests.hooks.transformers.training"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(SCRIPT, tmp_path_factory.mktemp("whole") / "store", "callback")


@pytest.mark.parametrize(
    ("interrupt", "first"),
    [
        # after the commit of step 6, in the middle of an epoch; tests of one process do it, too
        pytest.param("exception@8", 7, marks=pytest.mark.slow),
        pytest.param("sigterm@9", 10, marks=pytest.mark.slow),  # right after step 9 was saved: it is finished first
        ("kill_in_save@9", 7),  # the commit of step 9 does not come to be
    ],
)
def test_b84_goes_on_where_it_was_interrupted(whole: Ended, tmp_path: Path, interrupt: str, first: int) -> None:
    ended = train(SCRIPT, tmp_path / "store", "callback", interrupt=interrupt)
    assert ended.status != 0
    assert_same_losses(train(SCRIPT, tmp_path / "store", "callback"), whole, first=first)


def test_goes_on_from_two_commits_before(whole: Ended, tmp_path: Path) -> None:
    """By the mixin, with transformers' own way to say it; the SIGTERM comes while step 9 is being saved."""
    ended = train(SCRIPT, tmp_path / "store", "mixin", interrupt="sigterm@9")
    assert ended.status < 0
    roll_back(tmp_path / "store", 2)
    assert_same_losses(train(SCRIPT, tmp_path / "store", "mixin"), whole, first=4)


@pytest.mark.slow
def test_a_sigterm_may_make_a_commit_first(whole: Ended, tmp_path: Path) -> None:
    """transformers' enable_jit_checkpoint: the training saves where it is, and ends by itself."""
    ended = train(SCRIPT, tmp_path / "store", "jit", interrupt="sigterm@9")
    assert ended.status == 0
    assert 9 <= max(ended.losses) < 30
    rest = train(SCRIPT, tmp_path / "store", "callback")
    assert_same_losses(rest, whole, at_least=1)
    assert max(ended.losses) <= min(rest.losses) <= max(ended.losses) + 1  # it still makes the step that it is in


@pytest.mark.slow
def test_two_ranks_make_one_commit(tmp_path: Path) -> None:
    ranks = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", SCRIPT)
    together = train(*ranks, tmp_path / "whole" / "store", "callback")
    train(*ranks, tmp_path / "store", "callback", interrupt="exception@8")
    rest = train(*ranks, tmp_path / "store", "callback")
    assert_same_losses(rest, together, first=7, at_least=9)  # two ranks take 15 steps
    with tierload.open(tmp_path / "store") as store:
        assert {commit.ranks for commit in store.commits()} == {2}
