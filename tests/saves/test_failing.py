"""Saves that fail in the background, at every call of the storage and in every part of the engine: who is told, once,
and that the store and its thread work afterwards."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierload
from tests.cases.stores import SMALL, assert_is, state_of
from tests.saves.failing import LONG_S, Beside, Failing, assert_works, capped, error_of, until_writing
from tierload import SaveCancelled, Store, StoreFenced, StoreIOError, TierloadError, _native
from tierload.engine import background

# -- every call of the storage


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("op", ["create", "write", "sync", "sync_dir"])
@pytest.mark.parametrize("policy", ["raise", "retry"])
def test_each_call_of_the_storage(
    held: Failing, op: str, code: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_RETRY_SECONDS", (0.0, 0.0, 0.0))
    held.settings = replace(SMALL, on_failure=policy)  # type: ignore[arg-type]
    failed = 0
    for at in range(1, 100):
        held.arm(op, at, code)
        pending = held.async_save(state_of(at), step=at)
        error = pending._durable.exception(LONG_S)
        if not held.calm():
            assert error is None
            break
        failed += 1
        if policy == "retry":
            assert error is None, f"{op} {at}"
        elif error is not None:
            with pytest.raises(StoreIOError) as caught:
                pending.result()
            assert caught.value is error
            assert isinstance(error, StoreIOError)
            assert (error.errno, os.strerror(code) in str(error)) == (code, True)
            assert held.path in str(error.filename)
            assert any(f"step {at} " in note for note in error.__notes__)
        assert_is(held.load(), at if error is None else held.head().step)  # type: ignore[union-attr]
    assert failed >= 1
    assert pending.durable().step == at
    assert_works(held)


def test_the_first_failure_is_the_one_that_is_told(held: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the store cannot be opened anew after it; a later call does that."""
    monkeypatch.setattr(held, "calm", lambda: True)  # so that the opening fails too
    held.arm("write", 1)
    pending = held.async_save(state_of(1), step=1)
    error = error_of(pending)
    assert "/seg/" in str(error)
    assert any("could not be opened anew either" in note for note in error.__notes__)
    held.faults.disarm()
    with pytest.raises(StoreIOError, match="/seg/"):
        held.record("x", 1)
    for call in (held.commits, held.load, lambda: held.record("x", 1)):
        Beside(call).ends()
    assert_works(held)


def test_the_file_system_becomes_read_only(held: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of a save, as after an error of the disk: also the store cannot be opened anew. Until it can."""
    with monkeypatch.context() as patch:
        patch.setattr(held, "calm", lambda: True)
        held.arm("", 20, errno.EROFS, times=1 << 40)
        for step in (1, 2, 3):
            with pytest.raises(StoreIOError) as caught:
                Beside(lambda step=step: held.async_save(state_of(step), step=step).result()).ends()  # type: ignore[misc]
            assert caught.value.errno == errno.EROFS
            with tierload.open(held.path) as reader:
                assert_is(reader.load(), 0)
    held.calm()
    assert_is(held.load(), 0)
    assert_works(held)


# -- who is told

CALLS: dict[str, Callable[[Store], Any]] = {
    "save": lambda held: held.save(state_of(2), step=2),
    "async_save": lambda held: held.async_save(state_of(2), step=2).durable(),
    "load": lambda held: held.load(),
    "load of a step": lambda held: held.load(step=0),
    "record": lambda held: held.record("x", 1),
    "tag": lambda held: held.tag("x"),
    "tag of a step": lambda held: held.tag("x", 0),
    "rollback": lambda held: held.rollback(0),
    "collect": lambda held: held.collect(keep=1),
    "close": lambda held: held.close(),
    "exit": lambda held: held.__exit__(None, None, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_next_call_says_it_once(held: Failing, name: str) -> None:
    held.fails(step=7)
    with pytest.raises(StoreIOError) as caught:
        CALLS[name](held)
    assert any("step 7 " in note for note in caught.value.__notes__)
    CALLS[name](held)
    assert held.closed == (name in ("close", "exit"))
    assert tierload.load(held.path)["number"] in (0, 2)


@pytest.mark.parametrize("name", CALLS)
def test_what_the_handle_has_told_is_told(held: Failing, name: str) -> None:
    pending = held.fails()
    with pytest.raises(StoreIOError):
        pending.staged() or pending.durable()
    CALLS[name](held)
    with pytest.raises(StoreIOError):
        pending.result()  # as often as one asks


def test_several_failures_are_all_told(held: Failing) -> None:
    held.fails(step=7)
    held._background._untold, kept = [], held._background._untold  # type: ignore[union-attr]
    held.fails(step=8)
    held._background._untold[:0] = kept  # type: ignore[union-attr]
    with pytest.raises(StoreIOError) as caught:
        held.load()
    text = "".join(caught.value.__notes__)
    assert "step 7 " in text
    assert "step 8 " in text
    held.load()


def test_an_error_of_the_block_is_the_one_that_is_raised(store: Path) -> None:
    def body() -> None:
        with held:
            held.fails()
            raise KeyError("mine")

    held = Failing(store, _native.Faults())
    with pytest.raises(KeyError, match="mine") as caught:
        body()
    assert any("Besides, " in note and "write" in note for note in caught.value.__notes__)
    assert held.closed


def test_warn(held: Failing, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "tierload"):
        pending = held.fails("warn", step=7)
        for name in CALLS:
            if name not in ("close", "exit"):
                CALLS[name](held)
        with pytest.raises(StoreIOError):
            pending.result()
    assert sum("step 7 " in record.getMessage() for record in caplog.records) == 1


def test_retry_gives_up_in_the_end(held: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETRY_SECONDS", (0.0, 0.0, 0.0))
    attempts = 0
    real = held.write

    def write(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        held.arm("write", 2)
        return real(*arguments)

    monkeypatch.setattr(held, "write", write)
    held.settings = replace(SMALL, on_failure="retry")
    with pytest.raises(StoreIOError):
        held.async_save(state_of(1), step=1).result(LONG_S)
    assert attempts == 4
    monkeypatch.undo()
    assert_works(held)


def test_a_save_that_waits_to_be_tried_again_can_be_cancelled(held: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETRY_SECONDS", (3600.0,))
    held.settings = replace(SMALL, on_failure="retry")
    held.arm("sync", 1)
    pending = held.async_save(state_of(1), step=1)
    while pending.progress.phase != "waiting to try again":
        assert not pending.done()
        threading.Event().wait(0.01)
    assert pending.cancel()
    with pytest.raises(SaveCancelled, match="after it had failed"):
        pending.result()
    assert_works(held)


def test_retry_saves_what_was_there_at_the_call(held: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the bytes that were copied, in a new epoch."""
    monkeypatch.setattr(background, "_RETRY_SECONDS", (0.0,))
    epoch = held._native.epoch
    state = state_of(1)
    held.settings = replace(SMALL, on_failure="retry")
    held.arm("sync", 1)
    pending = held.async_save(state, step=1)
    state["w"].zero_()
    state["layers"].clear()
    assert pending.durable().step == 1
    assert held.was_hit
    assert held._native.epoch > epoch
    assert_is(held.load(), 1)


@pytest.mark.parametrize("policy", ["raise", "retry"])
def test_another_writer_took_over(held: Failing, policy: str) -> None:
    """What the newer one does counts, and this one does not try again."""
    held.settings = capped(0.02, on_failure=policy)
    pending = held.async_save(state_of(1), step=1)
    until_writing(pending)
    with Store(held.path, mode="w", settings=SMALL, take_over=True) as other:
        other.save(state_of(2), step=2)
        with pytest.raises(StoreFenced):
            pending.result(LONG_S)
        assert pending.progress.phase == "failed"
        with pytest.raises(TierloadError):
            Beside(lambda: held.save(state_of(3))).ends()
        other.save(state_of(4), step=4)
        assert [commit.step for commit in other.commits()] == [4, 2, 0]
    assert tierload.open(held.path).verify(full=True).ok
