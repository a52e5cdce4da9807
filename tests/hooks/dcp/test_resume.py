"""A run that saves by DCP is interrupted and goes on bit for bit; beside it, the same with torch's own storage."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import tierload
from tests.hooks.dcp.script import EVERY, STEPS
from tests.hooks.runs import Ended, assert_same_losses, roll_back, train

SCRIPT = "tests.hooks.dcp.script"
AT = 27


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run without interruption, and where its store is."""
    path = tmp_path_factory.mktemp("whole") / "store"
    return path, train(SCRIPT, "tierload", path)


def steps(path: Path) -> list[int | None]:
    with tierload.open(path) as store:
        return [commit.step for commit in store.commits()]


@pytest.mark.parametrize(
    ("interrupt", "status", "first"),
    [
        (f"kill_in_save@{2 * EVERY}", -signal.SIGKILL, {EVERY + 1}),
        pytest.param(f"exception@{AT}", 1, {2 * EVERY + 1}, marks=pytest.mark.slow),
        # The save of step 20 may not have been finished in seven steps.
        pytest.param(f"sigterm@{AT}", -signal.SIGTERM, {EVERY + 1, 2 * EVERY + 1}, marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_bit_for_bit(
    tmp_path: Path, whole: tuple[Path, Ended], interrupt: str, status: int, first: set[int]
) -> None:
    path, (_, right) = tmp_path / "store", whole
    ended = train(SCRIPT, "tierload", path, interrupt=interrupt)
    assert ended.status == status, ended.output
    rest = train(SCRIPT, "tierload", path)
    assert min(rest.losses) in first
    assert_same_losses(rest, right)
    assert steps(path)[0] == STEPS
    with tierload.open(path) as store:
        assert store.verify(full=True).ok


def test_it_goes_on_from_two_commits_before(tmp_path: Path, whole: tuple[Path, Ended]) -> None:
    shutil.copytree(whole[0], tmp_path / "store")
    roll_back(tmp_path / "store", 2)
    rest = train(SCRIPT, "tierload", tmp_path / "store")
    assert_same_losses(rest, whole[1], first=STEPS - 2 * EVERY + 1)


@pytest.mark.slow
def test_torchs_own_storage_gives_the_same_losses(tmp_path: Path, whole: tuple[Path, Ended]) -> None:
    ended = train(SCRIPT, "stock", tmp_path / "run", interrupt=f"exception@{AT}")
    assert ended.status == 1
    assert_same_losses(train(SCRIPT, "stock", tmp_path / "run"), whole[1], first=2 * EVERY + 1)
