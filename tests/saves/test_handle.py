"""A handle of a save: every method, in every phase."""

from __future__ import annotations

import io
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cases.stores import SMALL, assert_is, state_of, unreferenced
from tests.saves.failing import HELD, Beside, Failing, capped, in_flight, noise, until_writing
from tierload import (
    SaveCancelled,
    SaveTimeout,
    Store,
    StoreIOError,
)


def test_a_save_from_its_call_to_its_end(held: Failing) -> None:
    pending = held.async_save(state_of(1), step=1, metrics={"loss": 0.5}, tags=["best"], note="a note")
    pending.staged()
    commit = pending.durable()
    report = pending.result()
    assert report.commit is pending.result(0).commit
    assert commit.id == report.commit.id
    assert (commit.step, commit.metrics, commit.note) == (1, {"loss": 0.5}, "a note")
    assert held.find(tag="best").id == commit.id
    assert pending.done()
    assert (pending.step, pending.path, pending.skipped) == (1, held.path, False)
    assert report.waited_seconds == pending.waited > 0
    progress = pending.progress
    assert progress.phase == "durable"
    assert progress.staged_bytes == progress.written_bytes == progress.total_bytes == report.raw_bytes
    assert pending.cancel() is False, "it is too late"
    assert_is(held.load(), 1)
    assert repr(pending) == f"PendingSave(the save of step 1 into {held.path}: durable)"


def test_timeouts(held: Failing) -> None:
    """Each says what is late; the save goes on."""
    with in_flight(held) as pending:
        pending.staged(0)
        for wait in (pending.result, pending.durable):
            with pytest.raises(SaveTimeout, match=r"step 1 .* is not durable after 0\.01 s \(writing\); it goes on"):
                wait(0.01)
        with pytest.raises(TimeoutError):
            pending.result(0)
        assert repr(pending).endswith(": writing)")
    held.settings = capped(0.2)
    pending = held.async_save(state_of(2), step=2)
    with pytest.raises(SaveTimeout):
        pending.result(0)
    assert pending.result().commit.step == 2


def test_a_timeout_does_not_eat_a_failure(held: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which comes just then: the caller is told of it, or will be."""
    pending = held.fails()
    calls = 0
    real = pending._durable.exception

    def late(timeout: float | None = None) -> BaseException | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise TimeoutError
        return real(timeout)

    monkeypatch.setattr(pending._durable, "exception", late)
    with pytest.raises(StoreIOError):
        pending.result(1)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown(held: Failing, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody waits for it: bars on a terminal, lines elsewhere. It changes nothing of what comes out."""
    shown = io.StringIO()
    shown.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("tierload.observe.progress._LINE_S", 0.0)
    held.settings = capped(0.5)
    pending = held.async_save(noise(3, 256), step=3)
    with pytest.raises(SaveTimeout, match=r"not durable after 0\.3 s"):
        pending.result(0.3, progress=True)
    assert pending.durable(progress=True).step == 3
    assert "the save of step 3" in shown.getvalue()
    assert ("\x1b[" in shown.getvalue()) == terminal


def test_a_small_save_tells_what_its_call_took(store: Path) -> None:
    """It may be durable before the call has returned."""
    with Store(store, mode="w") as opened:
        for number in range(50):
            began = time.perf_counter()
            pending = opened.async_save({"number": number})
            took = time.perf_counter() - began
            assert 0 < pending.result().waited_seconds <= took
            assert pending.result().waited_seconds == pending.waited


def test_progress_never_goes_back(held: Failing) -> None:
    held.settings = capped(1.0)
    pending = held.async_save(noise(3, 512), step=3)
    seen = [pending.progress]
    while not pending.done():
        seen.append(pending.progress)
    seen.append(pending.progress)
    for before, after in pairwise(seen):
        assert before.staged_bytes <= after.staged_bytes <= after.total_bytes
        assert before.written_bytes <= after.written_bytes <= after.total_bytes
    phases = [progress.phase for progress in seen]
    assert phases == sorted(phases, key=["staging", "queued", "writing", "durable"].index)
    assert len({progress.written_bytes for progress in seen}) > 3


# -- cancel


def test_cancelled_while_it_writes(held: Failing, store: Path) -> None:
    with in_flight(held) as pending:
        pass
    with pytest.raises(SaveCancelled):
        pending.result()
    assert pending.cancel() is True, "it was cancelled"
    assert pending.progress.phase == "cancelled"
    after_a_cancel(held, store)


def test_cancelled_before_anybody_writes_it(held: Failing, store: Path) -> None:
    """Behind another save: it does not wait for that one."""
    with in_flight(held) as first:
        held.settings = replace(SMALL, on_busy="queue")
        second, third = held.async_save(noise(2), step=2), held.async_save(state_of(3), step=3)
        assert second.cancel() is True
        assert third.cancel() is True
        with pytest.raises(SaveCancelled, match="step 2"):
            second.result()
        assert second.done()
        assert not first.done()
        fourth = held.async_save(state_of(4), step=4)
    assert fourth.durable().step == 4
    assert [commit.step for commit in held.commits()] == [4, 0]
    after_a_cancel(held, store)


def after_a_cancel(held: Failing, store: Path) -> None:
    """Nothing is left of it, nobody is told of it later, and its memory is free."""
    assert not [file for file in unreferenced(store) if file.startswith("seg/") or file.startswith("man/")]
    arenas = held._background._arenas  # type: ignore[union-attr]
    assert not list(arenas._out)
    held.settings = replace(SMALL, host_budget_bytes=64 << 20)
    assert held.async_save(state_of(5), step=5).durable().step == 5
    assert held.load()["number"] == 5  # type: ignore[index]


def test_cancelled_by_several_threads(held: Failing) -> None:
    held.settings = HELD
    pending = held.async_save(noise(1), step=1)
    until_writing(pending)
    threads = [Beside(pending.cancel) for _ in range(8)]
    assert [thread.ends() for thread in threads] == [True] * 8
    with pytest.raises(SaveCancelled):
        pending.durable()
    held.settings = SMALL
    assert held.async_save(state_of(2), step=2).durable().step == 2


def test_cancelled_at_any_moment(held: Failing, store: Path) -> None:
    """Either it is committed and says so, or it is not."""
    for number in range(1, 41):
        pending = held.async_save(noise(number, 64), step=number)
        threading.Event().wait(number * 0.0003)
        gone = pending.cancel()
        head = held.head()
        assert head is not None
        assert (head.step == number) is not gone
        if gone:
            with pytest.raises(SaveCancelled):
                pending.result()
        else:
            assert pending.durable().step == number
    assert not unreferenced(store)


def test_a_cancelled_failure(held: Failing) -> None:
    """It has failed already: that is still to be told."""
    pending = held.fails()
    assert pending.cancel() is False
    with pytest.raises(StoreIOError):
        held.record("x", 1)


def test_cancelled_between_two_attempts(held: Failing) -> None:
    held.settings = replace(SMALL, on_failure="retry")
    held.arm("write", 1)
    pending = held.async_save(state_of(1), step=1)
    while pending.progress.phase != "waiting to try again":
        assert not pending.done()
    assert pending.cancel() is True
    assert held.was_hit
    assert_is(held.load(), 0)
