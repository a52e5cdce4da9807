"""Going back: reverse replay to every LSN gives the catalog of that time byte for byte, and rollbacks are commits.

Seeded sequences of every operation, with journals that roll early, collections, and reopenings in between.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.state.alike import assert_alike
from tests.store.support import SMALL, catalog_of, copied, ram_folder, writer
from tierload import CommitNotFound, Store, _native
from tierload.errors import InvalidRequest

ROLL_BYTES = 40_000


@pytest.fixture(autouse=True)
def journals_that_roll_early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _native.Store
    monkeypatch.setattr(_native, "Store", lambda **named: real(**{**named, "journal_roll_bytes": ROLL_BYTES}))


@dataclass
class Moment:
    """What a user saw right after an operation."""

    catalog: bytes
    head: str
    values: dict[str, object]


@dataclass
class Walk:
    """A store on which random things are done, and all that was seen on the way."""

    path: Path
    random: random.Random
    store: Store
    moments: dict[int, Moment] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    def see(self) -> None:
        head = self.store.head()
        lsn = self.store._native.last_lsn
        moment = Moment(catalog_of(self.store._native), head.id if head else "", self.store.recorded())
        assert self.moments.setdefault(lsn, moment) == moment, "an LSN has one state"

    def do(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        getattr(self, name)()
        self.see()

    def save(self) -> None:
        self.step += 1
        key = self.random.choice("abc")
        self.state = {**self.state, key: torch.full((self.random.randrange(1, 900),), self.step), "n": self.step}
        tags = tuple(self.random.sample(["best", "t1", "t2"], self.random.randrange(2)))
        commit = self.store.save(self.state, step=self.step, tags=tags, metrics={"loss": self.step / 7}).commit
        self.contents[commit.id] = dict(self.state)

    def record(self) -> None:
        key = self.random.choice(["lr", "loss", "loader/é"])
        for _ in range(self.random.randrange(3)):
            self.store.record(key, self.random.choice([1.5, "x" * self.random.randrange(3000), None, [1]]), sync=False)
        self.store.record(key, self.random.random(), step=self.step)

    def tag(self) -> None:
        name = self.random.choice(["t1", "t2", "best"])
        if name in self.store.tags() and self.random.random() < 0.5:
            self.store.tag(name, remove=True)
        elif self.store.commits():
            self.store.tag(name, self.random.choice(self.store.commits()))

    def rollback(self) -> None:
        commits = self.store.commits()
        if not commits:
            return
        before, target = self.store.head(), self.random.choice(commits)
        plan = self.store.rollback(target)
        assert plan.commit is not None
        assert before is not None
        assert plan.commit.source == target.id
        self.contents[plan.commit.id] = self.contents[target.id]
        self.state = dict(self.contents[target.id])

    def rollback_to_lsn(self) -> None:
        lsn = self.random.choice(sorted(self.moments))
        try:
            plan = self.store.rollback(lsn=lsn)
        except (CommitNotFound, InvalidRequest):
            head = self.moments[lsn].head
            assert head not in {commit.id for commit in self.store.commits()}, "the commit is there"
            return
        assert plan.commit is not None
        self.contents[plan.commit.id] = self.contents[self.moments[lsn].head]
        self.state = dict(self.contents[plan.commit.id])
        assert_alike(self.store.recorded(), self.moments[lsn].values)

    def collect(self) -> None:
        line = [commit.id for commit in self.store.commits() if not commit.superseded]
        report = self.store.collect(keep=self.random.randrange(1, 5), keep_every=self.random.choice([None, 3]))
        dropped = {commit.id for commit in report.dropped}
        now = [commit.id for commit in self.store.commits() if not commit.superseded]
        assert now == [commit for commit in line if commit not in dropped]

    def reopen(self) -> None:
        self.store.close()
        self.store = writer(self.path)


OPERATIONS = ["save"] * 5 + ["record"] * 4 + ["tag"] * 2 + ["rollback"] * 2 + ["rollback_to_lsn", "collect", "reopen"]


def walked(path: Path, seed: int, operations: int, without: tuple[str, ...] = ()) -> Walk:
    walk = Walk(path, random.Random(seed), writer(path))
    walk.see()
    for _ in range(operations):
        walk.do(walk.random.choice([name for name in OPERATIONS if name not in without]))
    return walk


def check_replay(walk: Walk) -> tuple[int, int]:
    """Every moment again, by undoing records; returns how many there are, and how many are older than what is kept."""
    native, gone = walk.store._native, 0
    oldest = min((commit.lsn for commit in walk.store.commits()), default=0)
    for lsn, moment in walk.moments.items():
        try:
            past = native.state_at(lsn)
        except InvalidRequest:
            assert lsn < oldest, f"LSN {lsn} cannot be reached, and a commit of LSN {oldest} is kept"
            gone += 1
            continue
        assert past.encode() == moment.catalog, f"the catalog of LSN {lsn} is another one"
        assert len(past.values) == len(moment.values)
        assert bool(past.head) == bool(moment.head)
    return len(walk.moments), gone


SEEDS = 16


@pytest.mark.parametrize("seed", range(SEEDS))
def test_reverse_replay_to_every_lsn(ram: Path, seed: int) -> None:
    walk = walked(ram / "store", seed, 45)
    seen, gone = check_replay(walk)
    assert seen > 25
    assert gone < seen
    walk.store.close()
    with tierload.open(walk.path, settings=SMALL) as reader:  # and as somebody else sees it
        for lsn in sorted(walk.moments)[-15:]:
            assert reader._native.state_at(lsn).encode() == walk.moments[lsn].catalog
        for commit in reader.commits():
            assert_alike(reader.load(commit=commit), walk.contents[commit.id])
        assert reader.verify(full=True).ok
        lsns = [change.lsn for change in reader.history()]
        assert lsns == list(range(lsns[0], lsns[-1] - 1, -1)), "the history has gaps"


def test_the_walks_do_everything(ram: Path) -> None:
    """Else the tests above would pass for want of operations."""
    counts: dict[str, int] = {}
    rolls = 0
    for seed in range(4):
        walk = walked(ram / str(seed), seed, 45)
        for name, count in walk.counts.items():
            counts[name] = counts.get(name, 0) + count
        rolls += sum(not file.name.endswith("-00000000") for file in (walk.path / "wal").iterdir())
        walk.store.close()
    assert set(counts) == set(OPERATIONS)
    assert rolls > 0, "no journal was rolled"


@pytest.fixture(scope="module")
def long_walk() -> Iterator[Walk]:
    with ram_folder() as folder:
        walk = walked(folder / "store", 77, 30, without=("collect",))
        walk.store.close()
        yield walk


def test_rollback_to_every_lsn_and_its_undoing(long_walk: Walk, ram: Path) -> None:
    """Content, head and recorded values are those of the time; a second rollback gives the present back."""
    present = max(long_walk.moments)
    done = 0
    for lsn, moment in long_walk.moments.items():
        with writer(copied(long_walk.path, ram / "copy")) as store:
            now = store._native.last_lsn
            if not moment.head:
                with pytest.raises((CommitNotFound, InvalidRequest)):
                    store.rollback(lsn=lsn)
                continue
            expected = store.rollback(lsn=lsn, dry_run=True)
            plan = store.rollback(lsn=lsn)
            assert plan.commit is not None
            assert (plan.target.id, plan.superseded, plan.values) == (
                expected.target.id,
                expected.superseded,
                expected.values,
            )
            assert plan.target.id == moment.head
            assert_alike(store.load(), long_walk.contents[moment.head])
            assert_alike(store.recorded(), moment.values)
            assert plan.commit.written_bytes == 0
            assert {commit.id for commit in store.commits() if not commit.superseded}.isdisjoint(
                commit.id for commit in plan.superseded
            )
            undone = store.rollback(lsn=now)
            assert undone.commit is not None
            assert_alike(store.load(), long_walk.contents[long_walk.moments[present].head])
            assert_alike(store.recorded(), long_walk.moments[present].values)
        with tierload.open(ram / "copy", settings=SMALL) as store:
            assert_alike(store.load(), long_walk.contents[long_walk.moments[present].head])
            assert_alike(store.recorded(), long_walk.moments[present].values)
            assert store.verify(full=True).ok
        done += 1
    assert done > 20


def test_an_lsn_that_is_not_there(ram: Path) -> None:
    with writer(ram / "store") as store:
        store.save({"a": 1}, step=1)
        before = catalog_of(store._native)
        for lsn in (store._native.last_lsn + 1, 2**63, 2**64, -1):
            with pytest.raises((InvalidRequest, CommitNotFound)):
                store.rollback(lsn=lsn)
        assert catalog_of(store._native) == before


def test_records_between_commits_are_finer_than_commits(ram: Path) -> None:
    """A value of the time between two commits comes back by its LSN, one of a commit by the commit."""
    with writer(ram / "store") as store:
        store.save({"n": 1}, step=1)
        places = {}
        for number in range(5):
            places[number] = store.record("lr", number / 8, step=1)
        second = store.save({"n": 2}, step=2).commit
        store.record("lr", 99.0)
        store.record("new", 1)
        for number, lsn in places.items():
            plan = store.rollback(lsn=lsn)
            assert store.recorded() == {"lr": number / 8}
            assert plan.values[:1] == ("lr",)
            assert store.load() == {"n": 1}
        store.rollback(second)
        assert store.recorded() == {"lr": 0.5}
        assert store.load() == {"n": 2}
        changes = [change for change in store.history() if change.kind == "change"]
        assert [change.after for change in changes] == [1, 99.0, 0.5, 0.375, 0.25, 0.125, 0.0]
        assert [change.before for change in changes] == [None, 0.5, 0.375, 0.25, 0.125, 0.0, None]
