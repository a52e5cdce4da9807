"""What the tests of saves in the background share: saves that stay in flight until the test wants them to end."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.api.ending_scripts import Script
from tests.cases.stores import SMALL, assert_is, state_of, unreferenced
from tierload import PendingSave, Settings, Store, _native

HELD = replace(SMALL, bandwidth_cap_mbps=0.001)
"""A page takes four seconds: what takes hours is in flight until it is cancelled."""


class Failing(Store):
    """A store whose ``faults`` count the calls of one attempt, and not those of the opening that follows its failure;
    ``was_hit`` says whether one came."""

    was_hit = False

    def __init__(self, path: Path, faults: _native.Faults, settings: Settings = SMALL) -> None:
        self.faults = faults
        super().__init__(path, mode="w", settings=settings, _faults=faults)

    def arm(self, op: str, at: int, code: int = errno.EIO, times: int = 1) -> None:
        self.was_hit = False
        self.faults.arm(at=at, kind="fail", code=code, op=op, times=times)

    def calm(self) -> bool:
        """Ends it; whether it had come."""
        self.was_hit = self.was_hit or self.faults.hit
        self.faults.disarm()
        return self.was_hit

    def reopen(self) -> None:
        self.calm()
        super().reopen()

    def fails(self, policy: str = "raise", step: int = 7) -> PendingSave:
        """A save that has failed, and nobody was told; the log's line about it is on stderr."""
        said = _Said()
        logging.getLogger("tierload").handlers.insert(0, said)  # before one that a test has broken
        before, self.settings = self.settings, replace(self.settings, on_failure=policy)  # type: ignore[arg-type]
        self.arm("write", 1)
        pending = self.async_save(state_of(step), step=step)
        self.settings = before
        pending._durable.exception(LONG_S)
        assert self.calm()
        assert said.event.wait(LONG_S)
        logging.getLogger("tierload").removeHandler(said)
        return pending


class _Said(logging.StreamHandler[Any]):
    """Says lines of the log as Python does by default, and that it has: nothing else is written between their words."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.event.set()


LONG_S = 100
"""Nobody waits so long; a test that does has found a hang."""


def noise(number: int, kib: int = 1024) -> dict[str, Any]:
    """A state with so many KiB that cannot be compressed, all of them new for every number."""
    source = torch.Generator().manual_seed(number)
    return {"number": number, "noise": torch.randint(0, 256, (kib << 10,), dtype=torch.uint8, generator=source)}


def capped(mbps: float, **more: Any) -> Settings:
    """Small pages, and so many megabytes a second."""
    return replace(SMALL, bandwidth_cap_mbps=mbps, **more)


def until_writing(pending: PendingSave) -> None:
    """Returns when a capped save has written something."""
    for _ in range(LONG_S * 100):
        if pending.progress.written_bytes > 0:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"nothing is written: {pending}")


@contextmanager
def in_flight(store: Store, number: int = 1, settings: Settings = HELD, **more: Any) -> Iterator[PendingSave]:
    """A save that stays in flight as long as the block, and is then given up."""
    before, store.settings = store.settings, settings
    pending = store.async_save(noise(number), step=number, **more)
    store.settings = before
    until_writing(pending)
    try:
        yield pending
        assert not pending.done(), "the block waited for it"
    finally:
        pending.cancel()


class Beside(threading.Thread):
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.value: Any = None
        self.error: BaseException | None = None
        self._call = call
        self.start()

    def run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def ends(self) -> Any:
        """Its value, or its error."""
        self.join(LONG_S)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.value

    def waits(self) -> bool:
        """Whether it has not ended yet, after it had a moment to do so."""
        self.join(0.2)
        return self.is_alive()


@contextmanager
def running(folder: Path, code: str, how: str = "file") -> Iterator[Script]:
    """A script in a process of its own, with all of ``fake_saves`` imported; it is killed when it hangs."""
    script = Script(code, folder, how)
    try:
        yield script
    finally:
        script.close()


def child_ends(child: int) -> int:
    """The status of a forked child: minus SIGALRM when it hangs."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def error_of(pending: PendingSave) -> BaseException:
    error = pending._durable.exception(LONG_S)
    assert error is not None
    return error


def assert_works(held: Store, step: int = 100) -> None:
    """Saves in both ways do, records too, everything that was acknowledged is whole, and nothing is left over."""
    Beside(lambda: held.record("works", step)).ends()
    assert Beside(lambda: held.async_save(state_of(step), step=step).durable()).ends().step == step
    Beside(lambda: held.save(state_of(step + 1), step=step + 1)).ends()
    for commit in held.commits():
        assert_is(held.load(commit=commit), commit.step or 0)
    for damage in held.verify(full=True).damages:  # where the write of one copy of the journal has failed
        assert damage.message.endswith("differs from its mirror")
    held.collect()
    held.close()
    assert not unreferenced(Path(held.path))
