"""Control-C and signal handlers at every line of the engine's Python, while saves are in flight.

A trace function stands for the signal: it is called in the main thread before each line, as a handler would be. It
leaves out the line of a ``with`` whose block has ended: CPython runs no handler between a block and its ``__exit__``.
"""

from __future__ import annotations

import dis
import faulthandler
import linecache
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tierload
from tests.cases.stores import SMALL, let_go, unreferenced
from tests.saves.failing import LONG_S, Beside
from tierload import PendingSave, SaveCancelled, TierloadError, TornSave, api
from tierload.engine import guards, leaving

PACKAGE = Path(tierload.__path__[0])
ENGINE = (str(PACKAGE / "engine"), str(PACKAGE / "api.py"))


@pytest.fixture(autouse=True)
def a_hang_says_where() -> Iterator[None]:
    """The main thread cannot be watched by another one's join: what hangs it ends the tests, with all stacks."""
    faulthandler.dump_traceback_later(LONG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def leaves_a_block(frame: FrameType) -> bool:
    code = frame.f_code
    if not linecache.getline(code.co_filename, frame.f_lineno).strip().startswith("with "):
        return False
    names = (step.opname for step in dis.get_instructions(code) if frame.f_lasti <= step.offset)
    return not next(name for name in names if name != "NOP").startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF"))


def at_line(number: int, action: Callable[[str], None]) -> tuple[Callable[..., Any], Callable[[], bool]]:
    """A trace function that calls ``action`` before the so-manieth line, once; and whether it did."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if event == "line" and not leaves_a_block(frame):
            left -= 1
            if left == 0:
                sys.settrace(None)
                action(f"{frame.f_code.co_name}, line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}")
        return trace

    return trace, lambda: left <= 0


def traced(trace: Callable[..., Any], call: Callable[[], object]) -> None:
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)


class Loop:
    """A model that is trained and saved: guarded, so that a part is copied late."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.guard = tierload.guard(self.optimizer)
        self.number = 0
        self.newest = 0
        self.step()
        tierload.save(self.state(), store, step=0, settings=SMALL)

    def state(self) -> dict[str, Any]:
        return {"number": self.number, "model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """Every weight then tells the number."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self.number)

    def next(self) -> int:
        self.number += 1
        self.step()
        return self.number

    def async_save(self) -> PendingSave:
        return tierload.async_save(self.state(), self.store, step=self.number)

    def cycle(self) -> None:
        """The whole use of a save."""
        pending = self.async_save()
        self.optimizer.step()
        pending.staged()
        pending.result()

    def check(self, where: str) -> None:
        """Nothing is in flight, nothing is lost, and the next save works."""
        held = api._writers[str(self.store.resolve())]
        before = self.number
        assert self.loaded() <= before, where
        self.next()
        pending = self.async_save()
        assert pending.staged() is None
        assert pending.durable().step == self.number, where
        assert self.loaded() == self.number
        background = held._background
        assert background is not None
        assert not background._in_flight, where
        assert not background._jobs, where
        assert not list(background._arenas._out), where
        assert not guards._settling, where
        assert not leaving._leaving.in_flight, where
        assert not leaving._leaving.untold, where

    def loaded(self) -> int:
        """The number of the newest commit, whose weights all tell it."""
        state: Any = tierload.load(self.store)
        for tensor in state["model"].values():
            assert (tensor == state["number"]).all()
        return int(state["number"])

    def end(self) -> None:
        self.guard.remove()
        held = tierload.open(self.store, mode="w")
        assert held.verify(full=True).ok
        held.collect()
        assert not [name for name in unreferenced(self.store) if not name.startswith("LIVE")]
        let_go(self.store)


@pytest.fixture
def loop(store: Path) -> Iterator[Loop]:
    made = Loop(store)
    made.check("the start")
    yield made
    made.end()


@pytest.mark.parametrize("budget", [0, 64 << 20])
def test_an_interrupt_at_any_line(loop: Loop, budget: int) -> None:
    """The errors, and all their frames, stay alive meanwhile."""
    tierload.open(loop.store, mode="w", settings=replace(SMALL, host_budget_bytes=budget, pack_below_bytes=64))
    kept: list[BaseException] = []

    def interrupt(where: str) -> None:
        raise KeyboardInterrupt(where)

    for at in range(1, 2000):
        loop.next()
        trace, came = at_line(at, interrupt)
        where = ""
        try:
            traced(trace, loop.cycle)
        except KeyboardInterrupt as error:
            kept.append(error)
            where = f"interrupt {at}, before {error.args[0]}"
        loop.check(where)
        if not came():
            break
    assert len(kept) > 100


HANDLERS: dict[str, Callable[[Loop, list[PendingSave]], object]] = {
    "save": lambda loop, _: tierload.save(loop.state(), loop.store, step=loop.number),
    "async_save": lambda loop, _: loop.async_save().durable(),
    "load": lambda loop, _: tierload.load(loop.store),
    "record": lambda loop, _: tierload.open(loop.store, mode="w").record("x", 1),
    "result": lambda loop, pending: [save.result() for save in pending],
    "staged": lambda loop, pending: [save.staged() for save in pending],
    "cancel": lambda loop, pending: [save.cancel() for save in pending],
    "step": lambda loop, _: loop.optimizer.step(),
}


def torn_by(name: str) -> AbstractContextManager[None]:
    """A step in the midst of the call changes what is being copied, which must not be saved."""
    return suppress(TornSave) if name == "step" else nullcontext()


@pytest.mark.parametrize("name", HANDLERS)
def test_a_handler_at_any_line(loop: Loop, name: str) -> None:
    """B34: it is done, or refused in clear words; nothing waits for itself."""
    refused = done = lines = 0
    settings = replace(SMALL, pack_below_bytes=64, on_busy="queue", on_failure="warn" if name == "step" else "raise")
    tierload.open(loop.store, mode="w", settings=settings)
    for at in range(1, 2000, 1 if name in ("save", "result") else 3):
        loop.next()
        earlier = [loop.async_save()]

        def handler(where: str, earlier: list[PendingSave] = earlier) -> None:
            nonlocal refused, done
            try:
                HANDLERS[name](loop, earlier)
                done += 1
            except SaveCancelled:
                done += 1
            except TierloadError as error:
                assert "under way" in str(error), where  # noqa: PT017
                refused += 1

        def body() -> None:
            pending = loop.async_save()
            tierload.guard(loop.optimizer)
            loop.optimizer.step()
            with torn_by(name):
                pending.staged()
            tierload.open(loop.store, mode="w").record("y", 2)
            with torn_by(name):
                pending.result()

        trace, came = at_line(at, handler)
        traced(trace, body)
        if name != "cancel":
            with torn_by(name):
                earlier[0].result()
        if not came():
            break
        lines += 1
    loop.check(name)
    assert lines > 50
    assert done > 20
    assert refused + done == lines


def test_real_signals_at_any_moment(loop: Loop) -> None:
    """A handler that saves, one that loads, and one that sets a flag, by timers."""
    chance = random.Random(3)
    told: list[str] = []
    flag = threading.Event()

    def handler(*_: object) -> None:
        what = chance.choice(["save", "async_save", "load", "flag"])
        if what == "flag":
            flag.set()
            return
        try:
            HANDLERS[what](loop, [])
            told.append("done")
        except TierloadError as error:
            told.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(150):
            loop.next()
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.004))
            loop.cycle()
            signal.setitimer(signal.ITIMER_REAL, 0)
            if flag.is_set():
                flag.clear()
                loop.async_save()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(text == "done" or "under way" in text for text in told), told
    loop.next()
    loop.cycle()
    loop.check("signals")


def test_control_c_at_any_moment(loop: Loop) -> None:
    """By a timer: in the native core too."""
    chance = random.Random(4)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    noise = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
    held = tierload.open(loop.store, mode="w")
    held.settings = replace(SMALL, page_bytes=1 << 20)
    try:
        for _ in range(60):
            loop.next()
            noise[loop.number] += 1
            state = loop.state() | {"noise": noise}
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.02))
                pending = tierload.async_save(state, loop.store, step=loop.number)
                loop.optimizer.step()
                pending.result()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 3
    loop.check("Control-C")


def test_a_save_from_another_thread_while_the_main_one_is_interrupted(loop: Loop) -> None:
    """What is refused is only what the interrupted thread itself would wait for."""

    def elsewhere(where: str) -> None:
        assert Beside(lambda: tierload.open(loop.store).load()).ends() is not None, where

    for at in range(1, 400, 7):
        loop.next()
        trace, came = at_line(at, elsewhere)
        traced(trace, loop.cycle)
        if not came():
            break
    loop.check("elsewhere")
