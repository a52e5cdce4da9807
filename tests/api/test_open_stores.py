"""Who holds a store, and for how long: modes, paths, closing, threads, forks, interruptions."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch

import tierload
from tests.cases.children import Say, beside, killed
from tests.cases.stores import SMALL, assert_is, let_go, state_of, unreferenced
from tests.store.support import in_child
from tierload import CommitNotFound, Store, StoreBusy, StoreFenced, StoreNotFound
from tierload.errors import InvalidRequest


def test_reading_makes_nothing(ram: Path) -> None:
    for path in (ram / "nothing", ram / "a" / "b"):
        for use in (tierload.load, tierload.open, lambda p: tierload.rollback(p, 1)):
            with pytest.raises(StoreNotFound, match=str(path)):
                use(path)
        assert not path.exists()
    (ram / "file").write_text("x")
    with pytest.raises(StoreNotFound):
        tierload.load(ram / "file")
    (ram / "other").mkdir()
    (ram / "other" / "model.pt").write_text("x")
    with pytest.raises(StoreNotFound):
        tierload.load(ram / "other")
    assert [path.name for path in (ram / "other").iterdir()] == ["model.pt"]
    with pytest.raises(InvalidRequest, match="mode"):
        tierload.open(ram / "x", mode="a")  # type: ignore[arg-type]


def test_a_reader_sees_what_was_there_when_it_was_opened(store: Path) -> None:
    tierload.save(state_of(1), store, step=1)
    with tierload.open(store) as reader:
        tierload.save(state_of(2), store, step=2)
        assert_is(reader.load(), 1)
        assert [commit.step for commit in reader.commits()] == [1]
        for write in (
            lambda: reader.save(state_of(3)),
            lambda: reader.tag("a"),
            lambda: reader.record("a", 1),
            lambda: reader.rollback(1),
            lambda: reader.collect(keep=1),
        ):
            with pytest.raises(InvalidRequest, match="reading only"):
                write()
    assert_is(tierload.load(store), 2)


def test_one_writer_by_every_path(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, absolute, with dots, through a link: the same store, held once."""
    (ram / "runs").mkdir()
    (ram / "link").symlink_to(ram / "runs")
    monkeypatch.chdir(ram)
    held = tierload.open("runs/a", mode="w")
    for path in (ram / "runs" / "a", "runs/../runs/a", "./runs/a/", ram / "link" / "a", str(ram / "link" / "a")):
        assert tierload.open(path, mode="w") is held
        tierload.save(state_of(1), path)
        assert_is(tierload.load(path), 1)
    assert len(held.commits()) == 5


def test_a_relative_path_stays_where_it_was(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that changes its folder after it opened a store."""
    (ram / "elsewhere").mkdir()
    monkeypatch.chdir(ram)
    held = tierload.open("store", mode="w")
    reader_path = os.path.relpath(ram / "store")
    held.save(state_of(1), step=1)
    reader = tierload.open(reader_path)
    monkeypatch.chdir(ram / "elsewhere")
    held.save(state_of(2), step=2)
    assert_is(held.load(), 2)
    assert_is(reader.load(), 1)
    assert held.verify(full=True).ok
    assert list((ram / "elsewhere").iterdir()) == []
    assert_is(tierload.load(ram / "store"), 2)


def test_two_stores_in_one_process(ram: Path) -> None:
    for number, name in ((1, "a"), (2, "b"), (3, "a"), (4, "b")):
        tierload.save(state_of(number), ram / name, step=number)
    assert_is(tierload.load(ram / "a"), 3)
    assert_is(tierload.load(ram / "b"), 4)
    tierload.rollback(ram / "a", 1)
    assert_is(tierload.load(ram / "a"), 1)
    assert_is(tierload.load(ram / "b"), 4)


def test_closing(store: Path) -> None:
    tierload.save(state_of(1), store, step=1)
    held = tierload.open(store, mode="w")
    held.record("a", 1, sync=False)
    assert not held.closed
    held.close()
    held.close()
    assert held.closed
    assert "closed" in repr(held)
    for use in (held.commits, held.load, lambda: held.save(state_of(2)), held.recorded, lambda: held.tag("x")):
        with pytest.raises(InvalidRequest, match="closed"):
            use()
    with tierload.open(store) as reader:
        assert reader.recorded() == {"a": 1}, "closing makes it durable"
    assert in_child(lambda: tierload.save(state_of(2), store, step=2).commit.step, seconds=30).value == 2


def test_stores_that_were_closed_are_let_go(ram: Path) -> None:
    """Each had a descriptor and its memory until the process ended."""
    known = []
    for number in range(3):
        with tierload.open(ram / str(number), mode="w") as writer:
            known.append(weakref.ref(writer))
            writer.save(state_of(1))
    del writer
    gc.collect()
    assert [store() is None for store in known[:-1]] == [True, True], "but the last one"


def test_loading_after_the_writer_was_closed(store: Path) -> None:
    """A store that was held in a ``with`` block, and then ``tierload.load``."""
    with tierload.open(store, mode="w") as held:
        held.save(state_of(1), step=1)
    assert_is(tierload.load(store), 1)
    tierload.save(state_of(2), store, step=2)
    assert_is(tierload.load(store), 2)


def test_settings_can_change_between_saves(store: Path) -> None:
    raw = tierload.Settings(compression="off")
    zeros = {"z": torch.zeros(100_000)}
    assert tierload.save(zeros, store, settings=raw).written_bytes >= 400_000
    assert tierload.save({"z": torch.ones(100_000)}, store).written_bytes >= 400_000, "they stay"
    small = tierload.Settings(compression="small")
    assert tierload.save({"z": torch.full((100_000,), 2.0)}, store, settings=small).written_bytes < 40_000
    assert tierload.load(store)["z"][99_999] == 2.0


# -- other processes


def test_somebody_else_holds_it(store: Path) -> None:
    """Refused by name at once; reading works; and the kernel lets go when the holder is killed."""

    def hold(say: Say) -> None:
        tierload.save(state_of(1), store, step=1)
        say("held")
        (store.parent / "ready").touch()
        time.sleep(60)

    with beside(hold):
        while not (store.parent / "ready").exists():
            time.sleep(0.01)
        for use in (
            lambda: tierload.save(state_of(2), store),
            lambda: tierload.open(store, mode="w"),
            lambda: tierload.rollback(store, 1),
        ):
            with pytest.raises(StoreBusy, match=r"process \d+") as found:
                use()
            holder = int(str(found.value).split("process ")[-1].split()[0])
            assert holder != os.getpid()
            assert Path(f"/proc/{holder}").exists(), "the message names the process"
            assert str(store) in str(found.value)
        assert_is(tierload.load(store), 1)
        assert tierload.open(store).verify(full=True).ok
    tierload.save(state_of(2), store, step=2)
    assert_is(tierload.load(store), 2)


def test_a_store_is_taken_over(store: Path) -> None:
    """From a holder that is frozen: what it does when it wakes up does not count, and it is told."""
    first = Store(store, mode="w", settings=SMALL)
    first.save(state_of(1), step=1)
    second = tierload.open(store, mode="w", take_over=True)
    second.save(state_of(2), step=2)
    with pytest.raises(StoreFenced, match="another writer"):
        first.save(state_of(3), step=3)
    with pytest.raises((StoreFenced, tierload.StorePoisoned)):
        first.record("a", 1)
    first.close()
    second.save(state_of(4), step=4)
    let_go(store)
    assert [commit.step for commit in tierload.open(store).commits()] == [4, 2, 1]
    assert_is(tierload.load(store), 4)
    tierload.open(store, mode="w").collect()
    assert not unreferenced(store)


def test_a_fork_with_a_live_store(store: Path) -> None:
    held = tierload.open(store, mode="w", settings=SMALL)
    held.save(state_of(1), step=1)

    def in_fork() -> tuple[str, ...]:
        said = []
        assert_is(tierload.load(store), 1)
        for use in (lambda: held.save(state_of(9)), lambda: tierload.save(state_of(9), store)):
            try:
                use()
                said.append("saved")
            except (InvalidRequest, StoreBusy) as error:
                said.append(str(error))
        held.close()
        return tuple(said)

    by_object, by_path = in_child(in_fork, seconds=30).value
    assert "process" in by_object
    assert str(os.getpid()) in by_path
    held.save(state_of(2), step=2)
    assert in_child(lambda: tierload.load(store)["number"], seconds=30).value == 2
    with pytest.raises(StoreBusy):
        Store(store, mode="w")
    assert [commit.step for commit in held.commits()] == [2, 1]
    assert held.verify(full=True).ok


def test_a_forked_child_does_not_keep_the_lock(store: Path) -> None:
    """A trainer is killed; a worker that it had forked lives on."""
    told = store.parent / "worker"
    trainer = os.fork()
    if trainer == 0:
        tierload.save(state_of(1), store, step=1, settings=SMALL)
        worker = os.fork()
        if worker:
            told.with_suffix(".new").write_text(str(worker))
            told.with_suffix(".new").rename(told)
        time.sleep(60)
        os._exit(0)
    while not told.exists():
        time.sleep(0.01)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    worker = int(told.read_text())
    try:
        os.kill(worker, 0)  # it lives
        tierload.save(state_of(2), store, step=2)
        assert_is(tierload.load(store), 2)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_record_survives_a_kill_at_once(store: Path) -> None:
    def record_on(say: Say) -> None:
        store_ = tierload.open(store, mode="w")
        for number in range(1_000_000):
            store_.record("n", number)
            say(number)

    words = killed(record_on, 0.4)
    assert words
    assert tierload.open(store).recorded()["n"] in (int(words[-1]), int(words[-1]) + 1)
    with pytest.raises(CommitNotFound, match="nothing has been saved"):
        tierload.load(store)
