"""B37, B39 and B43: what retention drops, in which order, and what it never touches."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.cases.children import Say, beside
from tests.cases.stores import SMALL, assert_is, data_files, let_go, state_of, unreferenced
from tests.store.ondisk import files_of
from tierload import CommitNotFound, Store, StoreIOError, TierloadError, _native
from tierload.errors import InvalidRequest


def save(path: Path, *numbers: int) -> None:
    for number in numbers:
        tierload.save(state_of(number), path, step=number, settings=SMALL)


def steps(path: Path) -> list[int | None]:
    """Steps of all commits, oldest first."""
    with Store(path) as store:
        return [commit.step for commit in reversed(store.commits())]


# -- B37


@pytest.mark.parametrize("times", ["random", "future", "equal", "reversed"])
def test_b37_file_times_do_not_matter(store: Path, times: str) -> None:
    chance = random.Random(7)
    save(store, 100, 200, 300, 400, 500)
    let_go(store)
    now = time.time()
    for place, name in enumerate(files_of(store)):
        stamp = {
            "random": chance.uniform(0, 2 * now),
            "future": now + 10**8 + place,
            "equal": now,
            "reversed": now - 1000 * place,
        }[times]
        os.utime(store / name, (stamp, stamp))
    save(store, 600)
    dropped = tierload.open(store, mode="w").collect(keep=3).dropped
    assert [commit.step for commit in dropped] == [100, 200, 300]
    assert steps(store) == [400, 500, 600]
    for number in (400, 500, 600):
        assert_is(tierload.load(store, step=number), number)
    assert_is(tierload.load(store), 600)
    assert not unreferenced(store)


def test_b37_steps_out_of_order_and_missing(store: Path) -> None:
    """The order is that of the commits: a lower step, the same one again, none at all."""
    save(store, 500, 100)
    tierload.save(state_of(7), store)
    save(store, 300, 300, 200)
    tierload.open(store, mode="w").collect(keep=4)
    assert steps(store) == [None, 300, 300, 200]
    assert_is(tierload.load(store), 200)


# -- B39


@pytest.fixture
def rolled_back(store: Path) -> Path:
    """Steps 500, 600, 700; back to 500; 510."""
    save(store, 500, 600, 700)
    tierload.rollback(store, 500)
    save(store, 510)
    return store


@pytest.mark.parametrize(("keep", "left"), [(2, {500, 510}), (1, {510})])
def test_b39_what_is_kept_after_a_rollback(rolled_back: Path, keep: int, left: set[int]) -> None:
    with Store(rolled_back) as store:
        found = {commit.step: commit for commit in store.commits() if commit.source is None}
        assert (found[600].superseded, found[700].superseded) == (True, True)
        assert (found[500].superseded, found[510].superseded, found[510].head) == (False, False, True)
    assert_is(tierload.load(rolled_back), 510)
    tierload.open(rolled_back, mode="w").collect(keep=keep)
    assert set(steps(rolled_back)) == left
    assert_is(tierload.load(rolled_back), 510)
    let_go(rolled_back)
    assert_is(tierload.load(rolled_back), 510)
    save(rolled_back, 520)
    assert_is(tierload.load(rolled_back), 520)
    assert not unreferenced(rolled_back)


@pytest.mark.parametrize("keep", [0, -1, -100])
def test_b39_to_keep_nothing_is_refused(rolled_back: Path, keep: int) -> None:
    before = steps(rolled_back)
    with pytest.raises(InvalidRequest, match=rf"{keep}.*at least 1"):
        tierload.open(rolled_back, mode="w").collect(keep=keep)
    assert steps(rolled_back) == before
    with pytest.raises(InvalidRequest, match="keep_every"):
        tierload.open(rolled_back, mode="w").collect(keep=1, keep_every=keep)
    assert steps(rolled_back) == before


def test_b39_without_a_number_nothing_is_dropped(rolled_back: Path) -> None:
    before = steps(rolled_back)
    report = tierload.open(rolled_back, mode="w").collect(keep=None)
    assert not report.dropped
    assert steps(rolled_back) == before
    assert_is(tierload.load(rolled_back), 510)


def test_b39_the_next_save_fails(rolled_back: Path) -> None:
    """Nothing is dropped by a save, so a failed one costs nothing."""
    let_go(rolled_back)
    faults = _native.Faults()
    with Store(rolled_back, mode="w", settings=SMALL, _faults=faults) as store:
        store.collect(keep=1)
        faults.arm(at=2, kind="partial", code=errno.ENOSPC, op="write")
        with pytest.raises(StoreIOError):
            store.save(state_of(520), step=520)
        assert_is(store.load(), 510)
    with Store(rolled_back) as store:
        assert_is(store.load(), 510)
        assert store.verify(full=True).ok


def test_b39_a_fresh_run_in_a_used_folder(store: Path) -> None:
    """A run that starts from step 0 again: the newest commit is what was saved last, not the highest step."""
    save(store, 500, 600, 700)
    let_go(store)
    save(store, 10)
    assert_is(tierload.load(store), 10)
    tierload.open(store, mode="w").collect(keep=1)
    assert steps(store) == [10]
    assert_is(tierload.load(store), 10)


def test_b39_a_superseded_commit_that_is_tagged_stays(rolled_back: Path) -> None:
    with tierload.open(rolled_back, mode="w") as store:
        with pytest.raises(CommitNotFound, match=r"700.*left behind"):
            store.tag("spike", 700)
        store.tag("spike", next(c for c in store.commits() if c.step == 700))
        store.collect(keep=1)
        assert_is(store.load(tag="spike"), 700)
        assert_is(store.load(), 510)
        assert next(c for c in store.commits() if c.step == 700).superseded
        with pytest.raises(CommitNotFound, match="700"):
            store.load(step=700)


# -- B43


def test_b43_readers_beside_50_saves_that_keep_one(store: Path) -> None:
    """Two readers load the newest in a loop while everything else is dropped after every save."""
    save(store, 1)
    (store / "seg" / ".nfs000000000abc").write_bytes(b"x")
    (store / "man" / ".nfs000000000abd").write_bytes(b"x")
    let_go(store)

    def read(say: Say) -> None:
        newest = 0
        while True:
            state = tierload.load(store)
            assert_is(state, state["number"])
            assert state["number"] >= newest
            newest = state["number"]
            say(newest)

    with beside(read) as first, beside(read) as second:
        for number in range(2, 52):
            save(store, number)
            tierload.open(store, mode="w").collect(keep=1)
            time.sleep(0.02)
    assert steps(store) == [51]
    assert len(set(first)) > 5
    assert len(set(second)) > 5
    tierload.open(store, mode="w").collect()
    assert {name for name in unreferenced(store) if ".nfs" not in name} == set()
    assert len([name for name in data_files(store) if ".nfs" in name]) == 2


def test_b43_what_a_reader_uses_stays(store: Path) -> None:
    """Two steps: dropped from the list at once, freed when the reader lets go."""
    tierload.save({"w": torch.arange(100_000)}, store, step=1, settings=SMALL)
    let_go(store)
    reader = Store(store)
    manifest = reader._native.manifest(reader.commits()[0].txid)  # what a load holds while it reads
    before = set(data_files(store))
    with tierload.open(store, mode="w") as writer:
        writer.save({"w": torch.arange(100_000) * 3}, step=2)
        report = writer.collect(keep=1)
        assert [commit.step for commit in report.dropped] == [1]
        assert report.pinned == 1
        assert before <= set(data_files(store))
        assert torch.equal(reader.load(step=1)["w"], torch.arange(100_000))
        del manifest
        report = writer.collect(keep=1)
        assert report.pinned == 0
        assert not before & set(data_files(store))
    with pytest.raises(TierloadError, match=r"collected|dropped|no longer") as found:
        reader.load(step=1)
    assert not isinstance(found.value, tierload.CorruptPage)


def test_b43_collected_between_open_and_load(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is slow: what it found newest is gone when it opens it. So it looks again."""
    save(store, 1)
    let_go(store)
    opened: list[Store] = []

    class Slow(Store):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            if not opened:
                opened.append(self)
                with Store(store, mode="w", settings=SMALL) as writer:
                    writer.save(state_of(2), step=2)
                    writer.save(state_of(3), step=3)
                    writer.collect(keep=1)

    monkeypatch.setattr(tierload.api, "Store", Slow)
    assert_is(tierload.load(store), 3)
    assert opened


def test_b43_files_that_somebody_else_removed(store: Path) -> None:
    """Another cleaner was faster: no error, and the rest is freed."""
    save(store, 1, 2, 3)
    tierload.open(store, mode="w").collect(keep=1, dry_run=True)
    assert steps(store) == [1, 2, 3]
    with tierload.open(store, mode="w") as held:
        doomed = [name for name in data_files(store) if "-000000000001." in name and name.startswith("man/")]
        assert len(doomed) == 2
        held.tag("x", 3)
        held._native.collect([1])
        for name in doomed:
            assert not (store / name).exists()
        held.collect(keep=1)
    let_go(store)
    assert steps(store) == [3]
    assert_is(tierload.load(store), 3)
