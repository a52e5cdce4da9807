"""One writer, any number of readers: locks that die with their process, fencing, and readers beside a writer."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.store.support import SMALL, Child, writer
from tierload import StoreBusy, TierloadError


def state(number: int) -> dict[str, Any]:
    """Several tensors that all say the same number, in pages of their own and in shared ones."""
    return {
        "a": torch.full((2500,), number, dtype=torch.float32),
        "b": torch.full((50,), number),
        "c": torch.full((3, 700), number, dtype=torch.float64),
        "n": number,
    }


def number_of(found: Any) -> int:
    """The one number that a whole state says."""
    numbers = {int(value) for key in "abc" for value in torch.unique(found[key]).tolist()} | {found["n"]}
    assert len(numbers) == 1, f"a mix of commits: {numbers}"
    return int(numbers.pop())


def holder(path: Path, pipe: Connection) -> None:
    """Holds the store, and does what it is told; answers with the error's class."""
    store = writer(path)
    store.save(state(1), step=1)
    pipe.send("ready")
    while True:
        command, _, number = pipe.recv().partition(" ")
        try:
            if command == "save":
                store.save(state(int(number)), step=int(number))
            elif command == "record":
                store.record("k", int(number))
            elif command == "tag":
                store.tag(f"tag{number}", store.commits()[-1])
            elif command == "rollback":
                store.rollback(1)
            elif command == "collect":
                store.collect(keep=int(number))
            elif command == "close":
                store.close()
            pipe.send("done")
        except TierloadError as error:
            pipe.send(type(error).__name__)


# -- the lock


def test_a_second_writer_is_told_who_holds_the_store(ram: Path) -> None:
    with Child(lambda pipe: holder(ram / "store", pipe)) as child:
        assert child.hear() == "ready"
        for attempt in (lambda: writer(ram / "store"), lambda: tierload.save(state(2), ram / "store")):
            with pytest.raises(StoreBusy) as found:
                attempt()
            for part in (str(child.pid), socket.gethostname(), str(ram / "store")):
                assert part in str(found.value)
        assert number_of(tierload.load(ram / "store")) == 1, "readers are not in the way"
        assert child.ask("save 2") == "done", "and a refused writer has harmed nobody"
        assert child.ask("close") == "done"
        with writer(ram / "store") as store:
            store.save(state(3), step=3)
    with tierload.open(ram / "store") as store:
        assert [commit.step for commit in store.commits()] == [3, 2, 1]


def test_a_second_object_in_the_same_process_is_refused_too(ram: Path) -> None:
    with writer(ram / "store"), pytest.raises(StoreBusy, match=str(os.getpid())):
        writer(ram / "store")
    first = tierload.open(ram / "other", mode="w", settings=SMALL)
    try:
        assert tierload.open(ram / "other", mode="w") is first, "the interface has one writer a process"
        tierload.save(state(1), ram / "other")
        assert len(first.commits()) == 1
    finally:
        first.close()


def test_the_lock_dies_with_its_process(ram: Path) -> None:
    with Child(lambda pipe: holder(ram / "store", pipe)) as child:
        assert child.hear() == "ready"
        child.signal(signal.SIGKILL)
        os.waitpid(child.pid, 0)
        with writer(ram / "store") as store:
            assert number_of(store.load()) == 1
            store.save(state(2), step=2)


def test_killed_at_any_moment_of_its_saves(ram: Path) -> None:
    """A kill test, which says nothing about power. What was acknowledged is there, and what is there is whole."""
    draw = random.Random(4)
    acknowledged = 0

    def saving(pipe: Connection) -> None:
        with writer(ram / "store") as store:
            for number in range(acknowledged + 1, 10_000):
                store.save(state(number), step=number)
                store.record("n", number)
                pipe.send(number)

    for _ in range(12):
        with Child(saving) as child:
            child.hear()
            time.sleep(draw.random() * 0.03)
            child.signal(signal.SIGKILL)
            os.waitpid(child.pid, 0)
            while child.pipe.poll(0):
                try:
                    acknowledged = child.pipe.recv()
                except EOFError:
                    break
        with tierload.open(ram / "store", settings=SMALL) as store:
            newest = number_of(store.load())
            assert newest >= acknowledged
            for commit in store.commits()[:4]:
                assert number_of(store.load(commit=commit)) == commit.step
            assert int(store.recorded().get("n", 0)) >= acknowledged  # type: ignore[call-overload]
            acknowledged = newest
    with writer(ram / "store") as store:
        store.collect()
        assert store.verify(full=True).ok


# -- forks


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_worker_that_outlives_its_killed_trainer_does_not_keep_the_lock(ram: Path, how: str) -> None:
    """A data-loader worker has copies of everything that its parent had open."""

    def trainer(pipe: Connection) -> None:
        store = writer(ram / "store")
        store.save(state(1), step=1)
        if how == "exec":
            worker = subprocess.Popen(["sleep", "60"], close_fds=False).pid
        else:
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
        pipe.send(worker)
        time.sleep(60)

    with Child(trainer) as child:
        worker = child.hear()
        child.signal(signal.SIGKILL)
        os.waitpid(child.pid, 0)
        try:
            os.kill(worker, 0)  # it lives
            with writer(ram / "store") as store:
                assert number_of(store.load()) == 1
                store.save(state(2), step=2)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_worker_that_ends_does_not_take_the_lock_with_it(ram: Path) -> None:
    def worker(pipe: Connection) -> None:
        store.close()
        pipe.send("closed")

    with writer(ram / "store") as store:
        store.save(state(1), step=1)
        with Child(worker) as child:
            assert child.hear() == "closed"
        with Child(lambda pipe: writer(ram / "store") and pipe.send("open")) as other:
            assert "StoreBusy" in other.hear()
        store.save(state(2), step=2)
    with tierload.open(ram / "store") as reader:
        assert [commit.step for commit in reader.commits()] == [2, 1]
        assert reader.verify(full=True).ok


@pytest.mark.parametrize("call", ["save", "record", "tag", "rollback", "collect", "close"])
def test_a_writer_that_was_inherited_by_a_fork_writes_nothing(ram: Path, call: str) -> None:
    """Its lock is the parent's. Two processes that append to one journal would write over each other."""
    calls = {
        "save": lambda store: store.save(state(9), step=9),
        "record": lambda store: store.record("k", 9),
        "tag": lambda store: store.tag("t"),
        "rollback": lambda store: store.rollback(1),
        "collect": lambda store: store.collect(keep=1),
        "close": lambda store: store.close(),
    }

    def worker(pipe: Connection) -> None:
        try:
            calls[call](store)
            pipe.send("done")
        except TierloadError as error:
            pipe.send(type(error).__name__)

    with writer(ram / "store") as store:
        store.save(state(1), step=1)
        store.save(state(2), step=2)
        store.record("k", 1, sync=False)
        with Child(worker) as child:
            answer = child.hear()
        store.save(state(3), step=3)
        store.record("k", 3)
    with tierload.open(ram / "store", settings=SMALL) as reader:
        assert [commit.step for commit in reader.commits()] == [3, 2, 1]
        for commit in reader.commits():
            assert number_of(reader.load(commit=commit)) == commit.step
        assert reader.recorded() == {"k": 3}
        assert reader.verify(full=True).ok, reader.verify(full=True).damages
    assert answer != "done" or call == "close", "what a worker was told is durable is not there"


def test_saving_by_name_in_a_fork_is_refused_while_the_parent_holds_the_store(ram: Path) -> None:
    tierload.save(state(1), ram / "store", settings=SMALL)
    try:
        with Child(lambda pipe: tierload.save(state(2), ram / "store") and pipe.send("saved")) as child:
            assert "StoreBusy" in child.hear()
        tierload.save(state(3), ram / "store")
        assert number_of(tierload.load(ram / "store")) == 3
    finally:
        tierload.open(ram / "store", mode="w").close()


def test_a_lock_of_another_program_is_named_as_well_as_can_be(ram: Path) -> None:
    """LOCK may hold anything: it is only shown."""
    path = ram / "store"
    writer(path).close()
    (path / "LOCK").write_bytes(b"\xff\x00 no json")
    script = (
        "import fcntl, struct, sys, time\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))\n"
        "print('held', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, path / "LOCK"], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(StoreBusy):
                writer(path)
        finally:
            other.kill()
    writer(path).close()
