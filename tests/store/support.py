"""What the tests of whole stores share: a small store with a history, exact comparison, children to try things in."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import tierload
from tests.state.alike import assert_alike
from tierload import Settings, Store, _native

SMALL = Settings(page_bytes=4096, pack_below_bytes=1024, threads=1)
"""Small pages, so that a small store has several; one thread, so that calls come in a fixed order."""


_RAM = "/dev/shm"


@contextmanager
def ram_folder() -> Iterator[Path]:
    """An empty folder, on tmpfs when there is one: nothing here is about durability."""
    usable = os.path.isdir(_RAM) and os.access(_RAM, os.W_OK)
    folder = Path(tempfile.mkdtemp(prefix="tierload-", dir=_RAM if usable else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def native(path: Path, *, writable: bool = False, roll: int = 0) -> _native.Store:
    """The native store by itself: what a reader knows before any page is read."""
    return _native.Store(
        path=str(path),
        writable=writable,
        holder="a test",
        take_over=False,
        faults=None,
        journal_roll_bytes=roll,
        block_bytes=1 << 20,
        depth=0,
    )


def catalog_of(store: _native.Store) -> bytes:
    """The whole catalog, encoded: commits with the manifests that they pin, head, tags, values."""
    return bytes(store.state_at(store.last_lsn).encode())


def manifest_of(store: Store, commit: tierload.Commit) -> str:
    """The path of a commit's manifest; its mirror has `.m` behind it."""
    return store._native.manifest(commit.txid).path.removesuffix(".m")


def writer(path: Path, **more: Any) -> Store:
    return Store(path, mode="w", settings=SMALL, **more)


def copied(store: Path, to: Path) -> Path:
    """A fresh copy of a store, in place of whatever is there."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(store, to)
    return to


def damage_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x55]))


@dataclass
class Sample:
    """A store and all that was put into it: the truth that damaged copies are compared with."""

    path: Path
    contents: dict[str, Any] = field(default_factory=dict)  # commit id: state
    order: list[str] = field(default_factory=list)  # commit ids, oldest first
    head: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    catalog: bytes = b""

    def keep(self, store: Store, state: Any, commit: tierload.Commit) -> None:
        self.contents[commit.id] = state
        self.order.append(commit.id)
        self.head = commit.id
        self.tags |= dict.fromkeys(commit.tags, commit.id)

    def finish(self, store: Store) -> None:
        self.values = store.recorded()
        self.catalog = catalog_of(store._native)
        store.close()


def make_sample(path: Path) -> Sample:
    """Two sessions: three commits, a tag, recorded values, a rollback; about 100 KB in all."""
    sample = Sample(path)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(2000, generator=generator)
    noise = torch.randint(0, 256, (3000,), generator=generator, dtype=torch.uint8)
    state = {"w": weight, "b": torch.arange(40), "z": torch.zeros(1500), "r": noise, "step": 1, "name": "née\n"}
    with writer(path) as store:
        sample.keep(store, state, store.save(state, step=1, metrics={"loss": 2.5}, tags=("first",)).commit)
    store = writer(path)
    store.record("lr", 0.5, step=1, sync=False)
    state = {**state, "w": torch.cat([weight[:1024], torch.randn(976, generator=generator)]), "step": 2}
    sample.keep(store, state, store.save(state, step=2).commit)
    store.record("lr", 0.25, step=2, sync=False)
    store.record("loader/position", [3, "a"], sync=False)
    state = {**state, "b": torch.arange(40) * 7, "step": 3}
    sample.keep(store, state, store.save(state, step=3, note="the third").commit)
    plan = store.rollback(2)
    assert plan.commit is not None
    sample.keep(store, sample.contents[sample.order[1]], plan.commit)
    sample.finish(store)
    return sample


def assert_whole(store: Store, sample: Sample, *, values: bool = True) -> None:
    """Every commit is there and loads bit for bit; head, tags and values are what they were."""
    assert [commit.id for commit in store.commits()] == sample.order[::-1]
    head = store.head()
    assert head is not None
    assert head.id == sample.head
    assert {name: commit.id for name, commit in store.tags().items()} == sample.tags
    if values:
        assert_alike(store.recorded(), sample.values)
    for commit in sample.order:
        assert_alike(store.load(commit=commit), sample.contents[commit])


@dataclass(frozen=True)
class Outcome:
    """How a child ended: with a value, an error, or by a signal: SIGXCPU when its time was up."""

    value: Any = None
    error: str = ""  # the class
    bases: tuple[str, ...] = ()
    message: str = ""
    trace: str = ""
    signal: int = 0

    @property
    def refused(self) -> bool:
        """An error that tierload raised on purpose."""
        return "TierloadError" in self.bases


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def in_child(body: Callable[[], Any], *, seconds: int = 10, mib: int = 0) -> Outcome:
    """Runs ``body`` in a forked child that has so many seconds of a processor, and whose memory may grow by ``mib``.

    What hangs, crashes or eats memory is then an outcome like any other. (A child that waits is killed too, but later.)
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60 + seconds)
            _limit(resource.RLIMIT_CPU, seconds)
            torch.set_num_threads(1)
            if mib:
                with open("/proc/self/statm", encoding="ascii") as file:
                    now = int(file.read().split()[0]) * resource.getpagesize()
                _limit(resource.RLIMIT_AS, now + (mib << 20))
            outcome = Outcome(body())
        except BaseException as error:  # noqa: BLE001
            names = tuple(kind.__name__ for kind in type(error).__mro__)
            outcome = Outcome(None, names[0], names, str(error), "".join(traceback.format_exception(error)[-4:]))
        try:
            data = pickle.dumps(outcome)
            while data:
                data = data[os.write(writing, data) :]
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome(signal=os.WTERMSIG(status))
    return pickle.loads(data)


class Child:
    """A forked process that does something while the parent looks on: both ends of a pipe, and its pid.

    The body's error, if any, comes as the last message, as text.
    """

    def __init__(self, body: Callable[[Connection], Any], *, seconds: int = 60) -> None:
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.pipe.close()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(seconds)
                torch.set_num_threads(1)
                body(theirs)
            except BaseException:  # noqa: BLE001
                theirs.send(traceback.format_exc())
            finally:
                os._exit(0)
        theirs.close()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(self.pid, os.WUNTRACED)

    def hear(self, seconds: float = 30) -> Any:
        """The next message."""
        assert self.pipe.poll(seconds), "the child says nothing"
        return self.pipe.recv()

    def ask(self, text: str) -> Any:
        self.pipe.send(text)
        return self.hear()

    def end(self) -> None:
        for number in (signal.SIGKILL, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
