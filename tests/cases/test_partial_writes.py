"""B22 and B25: a save that is killed or fails leaves the old state or the new one, never a mix or nothing.

These are kill tests: the page cache survives the process. What survives a power cut is proven in tests/crash.
"""

from __future__ import annotations

import itertools
import random
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch

import tierload
from tests.cases.children import Say, beside, killed
from tests.cases.stores import SMALL, assert_is, data_files, let_go, state_of, unreferenced
from tests.store.ondisk import files_of
from tierload import CommitNotFound, Store, StoreIOError, StoreNotFound, _native

OPERATIONS = "read write sync sync_dir open create remove truncate punch list make_dir map lock size linked".split()


def load_number(path: Path) -> int:
    """The number of the newest state, which is whole; 0 when there is none yet. There is nothing to warn of."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = tierload.load(path)
    except (CommitNotFound, StoreNotFound):
        return 0
    assert_is(state, state["number"])
    return state["number"]


def read_on_and_on(path: Path) -> None:
    newest = 0
    while True:
        number = load_number(path)
        assert number >= newest, f"{number} after {newest}"
        newest = number


@pytest.mark.parametrize("history", range(5))
def test_b22_sigkill_at_200_random_moments(ram: Path, history: int) -> None:
    """5 stores, each of them killed 41 times, the first time while it is made; a reader looks on all the time."""
    chance = random.Random(history)
    path = ram / "store"
    trials = 41
    newest = 0
    took = 0.05

    def save_on(say: Say) -> None:
        number = newest
        while True:
            number += 1
            tierload.save(state_of(number), path, step=number, settings=SMALL)
            say(number)

    with beside(lambda say: read_on_and_on(path)):
        for _ in range(trials):
            words = killed(save_on, chance.uniform(0, took))
            acknowledged = int(words[-1]) if words else newest
            found = load_number(path)
            assert found in (acknowledged, acknowledged + 1), f"{found} after {acknowledged} was acknowledged"
            newest = found
            took = 0.04 if words else min(took * 1.5, 0.3)  # on a busy machine the first save takes longer
    with tierload.open(path, mode="w") as store:
        assert sorted(c.step or 0 for c in store.commits()) == list(range(1, newest + 1))
        assert store.verify(full=True).ok
        assert not store.warnings
        store.collect()
    assert newest > trials // 4, "the children were killed before they came to anything"
    assert not unreferenced(path)


@pytest.mark.parametrize("kind", ["fail", "partial", "fail_after"])
def test_b22_a_writer_that_fails_at_every_call(ram: Path, kind: str) -> None:
    base, path = ram / "base", ram / "store"
    with Store(base, mode="w", settings=SMALL) as store:
        store.save(state_of(1), step=1)

    def attempt(op: str, at: int) -> tuple[bool, bool]:
        """Whether there was such a call, and whether the save said that it succeeded."""
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path)
        faults = _native.Faults()
        with Store(path, mode="w", settings=SMALL, _faults=faults) as store:
            faults.arm(at=at, kind=kind, code=5, op=op)
            try:
                store.save(state_of(2), step=2)
            except StoreIOError:
                return faults.hit, False
            return faults.hit, True

    wrong, outcomes = [], set()
    for op in OPERATIONS:  # by kind of call: workers change the order of all calls together
        for at in itertools.count(1):
            hit, done = attempt(op, at)
            if not hit:
                break
            try:
                found = load_number(path)
            except UserWarning as damage:
                wrong.append(f"{op} {at}: {damage}")
                continue
            if found not in ((2,) if done else (1, 2)):
                wrong.append(f"{op} {at}: found {found}, acknowledged: {done}")
            outcomes.add((op, done, found))
            tierload.save(state_of(3), path, step=3)
            assert load_number(path) == 3
            let_go(ram)
    assert not wrong, "\n".join(wrong)
    assert {("write", False, 1), ("sync", False, 1), ("sync", False, 2), ("create", False, 1)} <= outcomes


def test_b22_leftovers_are_ignored_and_cleaned_up(store: Path) -> None:
    for number in (1, 2):
        tierload.save(state_of(number), store, step=number, settings=SMALL)
    let_go(store)
    whole = data_files(store)
    segment, manifest = (max(name for name in whole if name.startswith(d)) for d in ("seg/", "man/"))
    partial = [f"seg/{segment[4:13]}00000000000f.r0000.0000", f"man/{manifest[4:13]}00000000000f.r0000"]
    for name in partial:  # what a save that was killed leaves
        (store / name).write_bytes((store / segment).read_bytes()[:5000])
    assert load_number(store) == 2
    tierload.save(state_of(3), store, step=3)
    assert load_number(store) == 3
    assert not set(partial) & set(files_of(store))
    assert tierload.open(store).verify(full=True).ok


@pytest.mark.parametrize(
    "name",
    [
        "seg/.tmp-x1y2",
        "wal/.nfs0001",
        "core.1234",
        "man/00000001-0000000000ff.r0000.tmp",
        "seg/00000001-000000000001.r0000.0000.bak",
        "man/00000001-0000000000ff.R0000",
        "seg/00000001-0000000000FF.r0000.0000",
    ],
)
def test_b22_files_of_other_names_are_ignored(store: Path, name: str) -> None:
    """docs/FORMAT.md section 2: what is not named like a file of the store is not the store's, and stays."""
    tierload.save(state_of(1), store, step=1, settings=SMALL)
    (store / name).write_bytes(b"x" * 100)
    let_go(store)
    tierload.save(state_of(2), store, step=2)
    tierload.open(store, mode="w").collect(keep=1)
    assert load_number(store) == 2
    assert name in files_of(store)
    assert tierload.open(store).verify(full=True).ok


def test_b25_a_reader_beside_a_writer_never_sees_a_mix(store: Path) -> None:
    """2 MiB a save, in 16 pages of each tensor: all of value 1, then of 2, 3 …; thirty commits are kept."""
    settings = tierload.Settings(page_bytes=65536, compression="off", threads=1)

    def values(number: int) -> dict[str, torch.Tensor]:
        return {name: torch.full((1 << 18,), number, dtype=torch.int32) for name in "ab"}

    tierload.save(values(1), store, step=1, settings=settings)
    let_go(store)

    def write(say: Say) -> None:
        for number in range(2, 10_000):
            tierload.save(values(number), store, step=number, settings=settings)
            tierload.open(store, mode="w").collect(keep=30)
            say(number)

    seen = []
    with beside(write) as written:
        end = time.monotonic() + 3
        while time.monotonic() < end or (len(set(seen)) < 5 and time.monotonic() < end + 20):
            state = tierload.load(store)
            numbers = torch.cat([state["a"], state["b"]]).unique().tolist()
            assert len(numbers) == 1, f"a mix of {numbers}"
            seen += numbers
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5
    assert abs(int(written[-1]) - seen[-1]) < 50
    state = tierload.load(store)
    assert state["a"].unique().numel() == 1
    assert torch.equal(state["a"], state["b"])
