"""B40: after a rollback it is the old state that counts, whatever stands beside it."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tierload
from tests.cases.children import Say, killed
from tests.cases.stores import SMALL, assert_is, let_go, state_of
from tierload import CommitNotFound, Store
from tierload.cli import app


@pytest.fixture
def five(store: Path) -> Path:
    """Steps 10 to 50, with a learning rate recorded before each."""
    for step in range(10, 60, 10):
        tierload.open(store, mode="w", settings=SMALL).record("lr", step / 1000, step=step)
        tierload.save(state_of(step), store, step=step)
    let_go(store)
    return store


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def abandoned(path: Path) -> set[int | None]:
    with Store(path) as store:
        return {commit.step for commit in store.commits() if commit.superseded}


def test_b40_by_command(five: Path) -> None:
    """List, roll back, list, resume, save 25, undo."""
    assert all(str(step) in command("log", five) for step in (10, 20, 30, 40, 50))
    dry = command("rollback", five, "--to", 20, "--dry-run")
    assert all(str(step) in dry for step in (30, 40, 50)), "a dry run shows what would be left behind"
    assert_is(tierload.load(five), 50)
    assert not abandoned(five)
    command("rollback", five, "--to", 20, "--yes")
    listed = json.loads(command("log", five, "--all", "--json"))
    assert {30, 40, 50} <= {commit["step"] for commit in listed["commits"]}
    assert abandoned(five) == {30, 40, 50}
    assert_is(tierload.load(five), 20)
    tierload.save(state_of(25), five, step=25)
    let_go(five)
    assert_is(tierload.load(five), 25)
    with Store(five) as store:
        was = next(commit for commit in store.commits() if commit.step == 50)
    command("rollback", five, "--to", was.id, "--yes")
    assert_is(tierload.load(five), 50)
    assert tierload.open(five).recorded() == {"lr": 0.05}
    assert 25 in abandoned(five)
    assert tierload.open(five).verify(full=True).ok


def test_b40_resuming_goes_on_from_20(five: Path) -> None:
    plan = tierload.rollback(five, 20)
    assert plan.head.step == 50
    assert plan.target.step == 20
    assert [commit.step for commit in plan.superseded] == [50, 40, 30]
    assert plan.values == ("lr",)
    assert plan.commit is not None
    assert plan.commit.source == plan.target.id
    assert plan.commit.written_bytes == 0
    let_go(five)
    assert_is(tierload.load(five), 20)
    with tierload.open(five) as store:
        assert store.recorded() == {"lr": 0.02}
        assert store.head() == plan.commit
        assert len(store.commits()) == 6
    saved = tierload.save(state_of(25), five, step=25).commit
    assert saved.parent == plan.commit.id
    let_go(five)
    assert_is(tierload.load(five), 25)
    assert abandoned(five) == {30, 40, 50}
    for step in (10, 20, 25):
        assert_is(tierload.load(five, step=step), step)
    with pytest.raises(CommitNotFound, match=r"50.*left behind by a rollback"):
        tierload.load(five, step=50)
    with Store(five) as store:
        for commit in store.commits():
            assert_is(store.load(commit=commit.id), commit.step or 0)


def test_b40_a_dry_run_changes_nothing(five: Path) -> None:
    before = tierload.open(five).commits()
    plan = tierload.rollback(five, 20, dry_run=True)
    assert [commit.step for commit in plan.superseded] == [50, 40, 30]
    assert plan.commit is None
    assert tierload.open(five).commits() == before
    assert_is(tierload.load(five), 50)


def test_b40_twice_is_as_once(five: Path) -> None:
    for _ in range(3):
        tierload.rollback(five, 20)
        assert_is(tierload.load(five), 20)
        assert abandoned(five) == {30, 40, 50}
        with Store(five) as store:
            assert store.recorded() == {"lr": 0.02}
    tierload.rollback(five, steps=1)
    assert_is(tierload.load(five), 10)


def test_b40_undo_and_undo_again(five: Path) -> None:
    """Every rollback is a commit: the one before it can be had back, by id."""
    newest = tierload.open(five).commits()[0]
    back = tierload.rollback(five, 20).commit
    undone = tierload.rollback(five, newest.id)
    assert undone.target.step == 50
    assert_is(tierload.load(five), 50)
    assert abandoned(five) == {20}
    again = tierload.rollback(five, back)
    assert again.target == back or again.target.step == 20
    assert_is(tierload.load(five), 20)
    assert abandoned(five) >= {30, 40, 50}
    tierload.rollback(five, steps=1)
    assert_is(tierload.load(five), 10)


def test_b40_by_steps_tag_id_and_lsn(five: Path) -> None:
    with tierload.open(five, mode="w") as store:
        commits = {commit.step: commit for commit in store.commits()}
        store.tag("good", 30)
    let_go(five)
    for target, step in (("good", 30), (commits[10].id, 10), (commits[40].id[:12], 40), (commits[20], 20), (20, 20)):
        tierload.rollback(five, target)
        assert_is(tierload.load(five), step)
    tierload.rollback(five, lsn=commits[50].lsn)
    assert_is(tierload.load(five), 50)
    tierload.rollback(five, steps=3)
    assert_is(tierload.load(five), 20)
    tierload.rollback(five, lsn=commits[30].lsn - 1)  # the learning rate of step 30 was recorded, and no commit
    assert_is(tierload.load(five), 20)
    with Store(five) as held:
        assert held.recorded() == {"lr": 0.03}


def test_b40_killed_in_the_middle_of_rollbacks(five: Path) -> None:
    """40 kills of a child that rolls back and forth: one of the two states, the acknowledged one or the next."""
    chance = random.Random(11)
    last = 50
    ended = 0
    took = 0.05

    def roll(say: Say) -> None:
        for step in itertools.cycle((20, 50) if last == 50 else (50, 20)):
            target = next(c for c in tierload.open(five, mode="w").commits() if c.step == step and c.source is None)
            tierload.rollback(five, target)
            say(step)

    commits = 5
    for _ in range(40):
        words = killed(roll, chance.uniform(0, took))
        with Store(five) as store:
            done = len(store.commits()) - commits
            assert done in (len(words), len(words) + 1), "every rollback that returned, and at most one more"
            last = last if done % 2 == 0 else 70 - last
            assert_is(store.load(), last)
            assert store.recorded() == {"lr": last / 1000}
            commits += done
        ended += len(words)
        took = 0.03 if words else min(took * 1.5, 0.3)
    assert ended > 20
    assert tierload.open(five).verify(full=True).ok
