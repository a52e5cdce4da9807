"""Taking a store over from a holder that is frozen, and readers beside a writer that saves and collects."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import tierload
from tests.store.support import SMALL, Child, native, writer
from tests.store.test_locking import holder, number_of, state
from tierload import CommitNotFound, StoreBusy, StoreFenced, StorePoisoned, TierloadError, _native
from tierload.errors import StoreIOError

# -- fencing


def test_a_frozen_holder_is_fenced(ram: Path) -> None:
    path = ram / "store"
    with Child(lambda pipe: holder(path, pipe)) as child:
        assert child.hear() == "ready"
        child.signal(signal.SIGSTOP)
        with pytest.raises(StoreBusy):
            writer(path)
        with writer(path, take_over=True) as store:
            assert number_of(store.load()) == 1
            store.save(state(2), step=2)
            store.record("k", 2)
            child.signal(signal.SIGCONT)
            assert child.ask("save 99") == "StoreFenced"
            assert child.ask("record 99") in ("StoreFenced", "StorePoisoned")
            store.save(state(3), step=3)
            store.tag("kept")
        with tierload.open(path, settings=SMALL) as reader:
            assert [commit.step for commit in reader.commits()] == [3, 2, 1]
            assert reader.recorded() == {"k": 2}
            assert reader.verify(full=True).ok
        with writer(path) as store:
            store.collect()
            assert [commit.step for commit in store.commits()] == [3, 2, 1]
            assert number_of(store.load()) == 3


@pytest.mark.parametrize("command", ["save 99", "record 99", "tag 99", "rollback", "collect 1"])
def test_nothing_that_a_fenced_holder_does_counts(ram: Path, command: str) -> None:
    """Whatever it tries first. A collection above all must free nothing."""
    path = ram / "store"
    with Child(lambda pipe: holder(path, pipe)) as child:
        assert child.hear() == "ready"
        assert child.ask("save 2") == "done"
        child.signal(signal.SIGSTOP)
        with writer(path, take_over=True) as store:
            store.save(state(3), step=3, tags=("mine",))
            child.signal(signal.SIGCONT)
            assert child.ask(command) == "StoreFenced"
            assert child.ask("save 100") in ("StoreFenced", "StorePoisoned")
            for step in (1, 2, 3):
                assert number_of(store.load(step=step)) == step
            store.save(state(4), step=4)
        with tierload.open(path, settings=SMALL) as reader:
            assert [commit.step for commit in reader.commits()] == [4, 3, 2, 1]
            assert set(reader.tags()) == {"mine"}
            assert reader.recorded() == {}
            assert reader.verify(full=True).ok


def test_taken_over_at_any_moment_of_its_saves(ram: Path) -> None:
    """What the holder acknowledged before is there; what was under way is whole or absent; nothing comes after."""
    path = ram / "store"
    draw = random.Random(9)

    def saving(pipe: Connection) -> None:
        with writer(path) as store:
            first = number_of(store.load()) if store.commits() else 0
            for number in range(first + 1, 100_000):
                try:
                    store.save(state(number), step=number)
                except TierloadError as error:
                    pipe.send(type(error).__name__)
                    return
                pipe.send(number)

    for _ in range(8):
        with Child(saving) as child:
            child.hear()
            time.sleep(draw.random() * 0.03)
            child.signal(signal.SIGSTOP)
            before = []
            while child.pipe.poll(0):
                before.append(child.pipe.recv())
            with writer(path, take_over=True) as store:
                newest = number_of(store.load())
                assert newest >= max(before, default=0)
                child.signal(signal.SIGCONT)
                heard = child.hear()
                assert heard in ("StoreFenced", newest), f"{heard} was acknowledged after the store was taken over"
                if heard == newest:
                    assert child.hear() == "StoreFenced"
                assert [commit.step for commit in store.commits()][:2] == [newest, newest - 1][: len(store.commits())]
                store.save(state(newest + 1), step=newest + 1)
        with tierload.open(path, settings=SMALL) as reader:
            assert number_of(reader.load()) == newest + 1
            assert all(commit.step == number_of(reader.load(commit=commit)) for commit in reader.commits()[:5])
            assert reader.verify(full=True).ok


def test_a_lock_that_was_removed_by_hand(ram: Path) -> None:
    """`rm LOCK` is a take-over by other means: the epoch fences."""
    path = ram / "store"
    with writer(path) as old:
        old.save(state(1), step=1)
        os.unlink(path / "LOCK")
        with writer(path) as store:
            with pytest.raises(StoreFenced):
                old.save(state(99), step=99)
            with pytest.raises((StoreFenced, StorePoisoned)):
                old.record("k", 1)
            store.save(state(2), step=2)
    with tierload.open(path) as reader:
        assert [commit.step for commit in reader.commits()] == [2, 1]


def test_a_holder_that_rolls_its_journal_does_not_undo_a_take_over(ram: Path) -> None:
    """The one who took over was killed between its journal and SUPER. Then either of them goes on, and never both."""
    path = ram / "store"
    roll = 30_000
    calls = _native.Faults()
    writer(path).close()
    calls.arm(at=0, op="write")
    writer(path, _faults=calls).close()
    for at in range(1, int(calls.calls) + 1):
        old = native(path, writable=True, roll=roll)
        for number in range(5):  # past the length at which it rolls, when it next begins a transaction
            old.change(b"k%d" % number, b'{"version":1,"root":{"d":{"value":1,"step":null}}}', number == 4)
        old.change(b"long", b'{"version":1,"root":{"d":{"value":"' + b"x" * roll + b'","step":null}}}', False)
        faults = _native.Faults()
        faults.arm(at=at, kind="fail", code=5, op="write")
        with pytest.raises(StoreIOError):
            writer(path, take_over=True, _faults=faults)
        before = old.last_lsn
        try:
            _native.Save(old).abort()
            lsn = old.change(b"acknowledged", b'{"version":1,"root":{"d":{"value":%d,"step":null}}}' % at, True)
            assert lsn > before
            acknowledged = True
        except (StoreFenced, StorePoisoned):
            acknowledged = False
        old.close()
        with writer(path) as store:
            assert not acknowledged or store.recorded()["acknowledged"] == at, (
                f"lost; the new writer failed at write {at}"
            )


# -- readers


def test_a_reader_survives_a_collection(ram: Path) -> None:
    """What it holds stays, is reported as pinned, and is freed when it is let go."""
    path = ram / "store"
    with writer(path) as store:
        for step in (1, 2, 3):
            store.save(state(step), step=step)
        reader = tierload.open(path, settings=SMALL)
        held = reader._native.manifest(reader.find(step=1).txid)
        report = store.collect(keep=1)
        assert [commit.step for commit in report.dropped] == [1, 2]
        assert report.pinned == 1
        pages = len(held.pages) // 64
        assert held.check(pages=range_of(pages), threads=1, progress=None) == []
        assert number_of(reader.load(step=3)) == 3
        with pytest.raises(TierloadError):
            reader.load(step=2)
        assert store.collect().pinned == 1
        del held
        freed = store.collect()
        assert freed.pinned == 0
        assert freed.freed_bytes > 0
        assert number_of(store.load()) == 3
        assert len(list((path / "man").iterdir())) == 2
        reader.close()


def range_of(count: int) -> object:
    import numpy as np

    return np.arange(count, dtype=np.uint32)


def saving(path: Path, pipe: Connection, keep: int | None) -> None:
    """Saves and records as fast as it can."""
    with writer(path) as store:
        for number in range(1, 100_000):
            store.save(state(number), step=number)
            store.record("n", number)
            if keep is not None:
                store.collect(keep=keep)
            if number == 1:
                pipe.send("ready")


@pytest.mark.parametrize("keep", [None, 2])
def test_readers_beside_a_writer_see_whole_commits(ram: Path, keep: int | None) -> None:
    """All of one state, never older than what was seen before, and no error, even while old commits are collected."""
    path = ram / "store"
    with Child(lambda pipe: saving(path, pipe, keep)) as child:
        assert child.hear() == "ready"
        last, seen, end = 0, set(), time.monotonic() + 20
        while time.monotonic() < end and len(seen) < 60:
            with tierload.open(path, settings=SMALL) as reader:
                head = reader.head()
                assert head is not None
                recorded = int(reader.recorded().get("n", 0))  # type: ignore[call-overload]
                assert recorded in (head.step, (head.step or 0) - 1), "one state of the journal"
                try:
                    assert number_of(reader.load()) == head.step
                except CommitNotFound:
                    assert keep is not None, "a reader's list may be older than a collection, and nothing else"
            number = number_of(tierload.load(path))
            assert number >= max(last, head.step or 0)
            last = number
            seen.add(number)
    assert len(seen) > 10


def test_readers_beside_a_writer_are_not_told_of_damage(ram: Path) -> None:
    """The writer puts a group into one copy of the journal after the other: that is no damage."""
    path = ram / "store"
    with Child(lambda pipe: saving(path, pipe, None)) as child:
        assert child.hear() == "ready"
        end, told = time.monotonic() + 2, set()
        while time.monotonic() < end:
            with tierload.open(path, settings=SMALL) as reader:
                told |= {*reader.warnings, reader.damage, *(damage.message for damage in reader.verify().damages)}
    assert told <= {""}


def test_threads_share_a_writer(ram: Path) -> None:
    """Saves, records, loads, verifications and collections from several threads: each is whole, and none fails."""
    path = ram / "store"
    errors: list[BaseException] = []
    with writer(path) as store:
        store.save(state(1), step=1)

        def work(thread: int) -> None:
            try:
                for number in range(6):
                    step = 10 * thread + number
                    store.save(state(step), step=step)
                    store.record(f"t{thread}", number)
                    number_of(store.load())
                    assert store.verify().ok
                    store.collect(keep=4)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        store.collect()
        assert store.recorded() == {f"t{thread}": 5 for thread in range(1, 5)}
        assert len(store.commits()) == 4
        assert store.verify(full=True).ok


def test_a_store_that_is_removed_under_its_writer(ram: Path) -> None:
    """Nothing is acknowledged that is in no store any more; by name, the next save makes a new one."""
    path = ram / "store"
    with writer(path) as store:
        store.save(state(1), step=1)
        shutil.rmtree(path)
        for attempt in (lambda: store.record("k", 1), lambda: store.save(state(2)), lambda: store.tag("t")):
            with pytest.raises(TierloadError):
                attempt()
    tierload.save(state(3), path, settings=SMALL)
    shutil.rmtree(path)
    with pytest.raises(TierloadError):
        tierload.save(state(4), path)
    tierload.save(state(5), path)
    assert number_of(tierload.load(path)) == 5
    tierload.open(path, mode="w").close()
