"""B23: which checkpoint a resume takes when the newest one is not whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, manifest_of, segments_of, state_of
from tierload import CorruptPage, CorruptStore, Store
from tierload.cli import app


@pytest.fixture
def three(store: Path) -> Path:
    """Steps 10, 20 and 30, each with segments of its own; nobody holds the store."""
    for step in (10, 20, 30):
        tierload.save(state_of(step), store, step=step, settings=SMALL)
    let_go(store)
    return store


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def tear(path: Path) -> None:
    """Cut a journal in the middle of its first record. (They are filled with zeros far ahead of their end.)"""
    os.truncate(path, 4150)


def cut(path: Path) -> None:
    """Cut a journal after the record of step 10."""
    os.truncate(path, 12288)


ALL = [remove, truncate, empty, zero]
Damage = Callable[[Path], None]


def files_of_30(path: Path) -> tuple[list[str], str, str]:
    """Segments that only the newest commit has, its manifest, and its id."""
    with Store(path) as store:
        newest, older, _ = store.commits()
        own = sorted(set(segments_of(store, newest)) - set(segments_of(store, older)))
        return own, manifest_of(store, newest), newest.id


@pytest.mark.parametrize("damage", [remove, truncate, empty])
def test_b23_a_segment_that_is_not_there_or_not_whole(three: Path, damage: Damage) -> None:
    (segment,), _, newest = files_of_30(three)
    damage(three / segment)
    with pytest.warns(UserWarning, match=r"20.*30") as told:
        assert_is(tierload.load(three), 20)
    text = str(told[0].message)
    assert newest[:12] in text
    assert segment in text, "why 30 was passed over"
    with pytest.raises(CorruptStore, match=segment):
        tierload.load(three, step=30)
    with pytest.raises(CorruptStore):
        tierload.load(three, commit=newest)


def test_b23_a_segment_of_zeros(three: Path) -> None:
    """Sizes agree, so this is found when its pages are read. Then 30 is refused by name (as B63 wants it), and 20 is
    there for who asks for it."""
    (segment,), _, newest = files_of_30(three)
    zero(three / segment)
    for load in (lambda: tierload.load(three), lambda: tierload.load(three, step=30)):
        with pytest.raises(CorruptPage, match=segment) as found:
            load()
        assert found.value.commit == newest
        assert "step 30" in str(found.value)
        assert "roll back" in str(found.value), "what to do"
    assert_is(tierload.load(three, step=20), 20)
    tierload.rollback(three, 20)
    assert_is(tierload.load(three), 20)


@pytest.mark.parametrize("damage", ALL)
def test_b23_both_copies_of_the_manifest(three: Path, damage: Damage) -> None:
    _, manifest, newest = files_of_30(three)
    for name in (manifest, manifest + ".m"):
        damage(three / name)
    with pytest.warns(UserWarning, match=r"20.*30") as told:
        assert_is(tierload.load(three), 20)
    assert manifest in str(told[0].message)
    with pytest.raises(CorruptStore, match="manifest"):
        tierload.load(three, step=30)
    assert any(newest in found.commits for found in tierload.open(three).verify().damages)


@pytest.mark.parametrize("damage", ALL)
@pytest.mark.parametrize("mirror", ["", ".m"])
def test_b23_one_copy_of_the_manifest(three: Path, damage: Damage, mirror: str) -> None:
    _, manifest, _ = files_of_30(three)
    damage(three / (manifest + mirror))
    assert_is(tierload.load(three), 30)
    assert any(manifest in found.message for found in tierload.open(three).verify().damages)


@pytest.mark.parametrize("damage", [remove, cut, tear, empty, zero])
@pytest.mark.parametrize("copy", ["c", "m"])
def test_b23_one_copy_of_the_journal(three: Path, damage: Damage, copy: str) -> None:
    (journal,) = (three / "wal").glob(f"{copy}-*")
    damage(journal)
    assert_is(tierload.load(three), 30)
    assert not tierload.open(three).verify().ok
    tierload.save(state_of(40), three, step=40)
    assert_is(tierload.load(three), 40)
    let_go(three)
    assert_is(tierload.load(three, step=30), 30)


@pytest.mark.parametrize("damage", [remove, tear, empty, zero])
def test_b23_both_copies_of_the_journal(three: Path, damage: Damage) -> None:
    """The marker of every commit is gone: an error, not an empty store and a training run from step 0."""
    for journal in (three / "wal").iterdir():
        damage(journal)
    with pytest.raises(CorruptStore, match="journal"):
        tierload.load(three)
    with pytest.raises(CorruptStore, match="journal"):
        tierload.save(state_of(1), three, step=1)


@pytest.mark.parametrize("damage", ALL)
def test_b23_the_superblock(three: Path, damage: Damage) -> None:
    damage(three / "SUPER")
    with tierload.open(three) as store:
        assert store.warnings
        assert_is(store.load(), 30)
        assert not store.verify().ok
    tierload.save(state_of(40), three, step=40)
    let_go(three)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is(tierload.load(three), 40)
        assert_is(tierload.load(three, step=30), 30)
    assert tierload.open(three).verify(full=True).ok


@pytest.mark.parametrize("damage", [remove, zero])
@pytest.mark.parametrize("what", ["segment", "manifest"])
def test_b23_training_goes_on_from_what_was_picked(three: Path, damage: Damage, what: str) -> None:
    """Rolled back to 20, saved again: from then on nothing warns, and 30 can be dropped."""
    (segment,), manifest, _ = files_of_30(three)
    for name in (segment,) if what == "segment" else (manifest, manifest + ".m"):
        damage(three / name)
    tierload.rollback(three, 20)
    tierload.save(state_of(25), three, step=25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is(tierload.load(three), 25)
    with tierload.open(three, mode="w") as store:
        store.collect(keep=2)
        assert {commit.step for commit in store.commits()} == {20, 25}
        assert store.verify(full=True).ok
    let_go(three)
    assert_is(tierload.load(three), 25)


@pytest.mark.parametrize("damage", [remove, zero])
def test_b23_rolling_back_by_command(three: Path, damage: Damage) -> None:
    """What the warning says to do."""
    _, manifest, _ = files_of_30(three)
    for name in (manifest, manifest + ".m"):
        damage(three / name)
    for options in (["--dry-run"], ["--yes"]):
        done = CliRunner().invoke(app, ["rollback", str(three), "--to", "20", *options])
        assert done.exit_code == 0, done.output
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is(tierload.load(three), 20)


def test_b23_saving_over_a_damaged_head(three: Path) -> None:
    """A script that only saves: the new state is whole by itself, and what was damaged is still reported."""
    (segment,), _, newest = files_of_30(three)
    remove(three / segment)
    tierload.save({**state_of(30), "number": 31}, three, step=31)
    let_go(three)
    state = tierload.load(three)
    assert state["number"] == 31
    state["number"] = 30
    assert_is(state, 30)
    report = tierload.open(three).verify(full=True)
    assert {commit for damage in report.damages for commit in damage.commits} == {newest}
