"""One store and several threads, and interruptions at any moment."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, state_of, unreferenced


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt before a line may come where none does otherwise, at the end of a `with`: the lock of the interface
    is then left held by this thread, and others of a later test would wait for ever."""
    monkeypatch.setattr(tierload.api, "_lock", threading.RLock())


def test_threads_share_one_store(store: Path) -> None:
    held = tierload.open(store, mode="w", settings=SMALL)
    held.save(state_of(1), step=1)
    errors: list[BaseException] = []

    def run(work: Callable[[int], object], count: int) -> None:
        try:
            for number in range(count):
                work(number)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def look(number: int) -> None:
        state = held.load() if number % 2 else tierload.load(store)
        assert_is(state, state["number"])

    works: list[tuple[Callable[[int], object], int]] = [
        (lambda n, base=base: held.save(state_of(base + n), step=base + n), 15) for base in (100, 200, 300)
    ]
    works += [(look, 30), (lambda n: held.record("n", n, sync=n % 3 == 0), 50), (lambda n: held.verify(full=True), 5)]
    works += [(lambda n: held.tag(f"t{n}"), 10), (lambda n: list(held.history()), 10), (lambda n: held.collect(), 3)]
    threads = [threading.Thread(target=run, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    found = {commit.step for commit in held.commits()}
    assert found == {1} | {base + n for base in (100, 200, 300) for n in range(15)}
    for commit in held.commits():
        assert_is(held.load(commit=commit), commit.step or 0)
    let_go(store)
    assert tierload.open(store).verify(full=True).ok


def test_an_interrupt_at_any_line_leaves_the_store_usable(store: Path) -> None:
    """KeyboardInterrupt before every line of the engine's Python in turn; the error, and all its frames, stay alive."""
    newest = 1
    tierload.save(state_of(newest), store, step=newest, settings=SMALL)
    kept: list[BaseException] = []
    engine = (str(Path(tierload.__path__[0]) / "engine"), str(Path(tierload.__path__[0]) / "api.py"))
    for at in range(1, 400):
        left = at

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(engine):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt(f"{frame.f_code.co_name}, line {frame.f_lineno}")
            return trace

        number = newest + 1
        sys.settrace(trace)
        try:
            tierload.save(state_of(number), store, step=number)
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        where = kept[-1].args[0] if kept else ""
        found = tierload.load(store)["number"]
        assert found in (newest, number), where
        try:
            tierload.save(state_of(number + 1), store, step=number + 1)
        except tierload.TierloadError as error:
            pytest.fail(f"after an interrupt in {where}: {type(error).__name__}: {error}")
        newest = number + 1
        assert_is(tierload.load(store), newest)
        if left > 0:
            break
    assert len(kept) > 30
    assert tierload.open(store).verify(full=True).ok
    kept.clear()
    tierload.open(store, mode="w").collect()
    assert not unreferenced(store)


def seconds_of_a_save(store: Path, noise: torch.Tensor) -> float:
    """What a save of this takes here and now, so that alarms come within one on any machine."""
    taken = []
    for number in range(5):
        noise[0] = number
        start = time.perf_counter()
        tierload.save({"number": number, "noise": noise}, store.with_name("timed"))
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_an_interrupt_at_any_moment(store: Path) -> None:
    """Control-C by a timer, in the midst of saves of 16 MiB: in the native core too, where it waits for its end."""
    chance = random.Random(5)
    noise = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    tierload.save({"number": 0, "noise": noise}, store)  # an interrupt may come before there is a store, too
    seconds = seconds_of_a_save(store, noise)
    before = signal.signal(signal.SIGALRM, interrupt)
    newest, interrupted = 0, 0
    try:
        for number in range(1, 21):
            noise[number] += 1
            state = {"number": number, "noise": noise}
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.02, 1) * seconds)
            try:
                tierload.save(state, store, step=number)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            found = tierload.load(store)["number"]
            assert found in (newest, number)
            newest = found
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 3
    tierload.save({"number": 99, "noise": noise}, store)
    assert torch.equal(tierload.load(store)["noise"], noise)
    assert tierload.open(store).verify(full=True).ok


def test_a_save_from_a_signal_handler(store: Path) -> None:
    """It cannot be done in the midst of another one: no deadlock, a clear refusal, and both states are whole. (B34)"""
    noise = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)
    tierload.save({"number": 0, "noise": noise}, store, step=0)
    told: list[str] = []

    def handler(*_: object) -> None:
        try:
            tierload.save({"number": 100 + number, "noise": noise}, store, step=100 + number)
            told.append("saved")
        except tierload.TierloadError as error:
            told.append(str(error))

    seconds = seconds_of_a_save(store, noise)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(1, 11):
            noise[number] += 1
            signal.setitimer(signal.ITIMER_REAL, seconds * number / 11)
            tierload.save({"number": number, "noise": noise}, store, step=number)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert told
    assert all(text == "saved" or "under way" in text for text in told), told
    commits = tierload.open(store).commits()
    assert {commit.step for commit in commits} >= set(range(11))
    assert len(commits) == 11 + told.count("saved")
    for commit in commits:
        assert tierload.load(store, commit=commit.id)["number"] == commit.step
    assert tierload.open(store).verify(full=True).ok
