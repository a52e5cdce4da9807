"""Saves that fail in the background by mistakes and shortages in the engine's own parts, and in waves."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
import tierload.engine.writing
from tests.cases.stores import SMALL, assert_is, state_of
from tests.saves.failing import LONG_S, Beside, Failing, assert_works, capped, error_of, noise
from tierload import Settings, Store, StoreIOError, _native
from tierload.engine import background, memory, staging


@pytest.fixture
def held(store: Path) -> Iterator[Failing]:
    """A store with a commit of number 0."""
    with Failing(store, _native.Faults()) as opened:
        opened.save(state_of(0), step=0)
        yield opened


# -- the engine's own parts


def boom(*_: object, **__: object) -> Any:
    raise RuntimeError("boom")


def no_memory(*_: object, **__: object) -> Any:
    raise MemoryError("no room for a copy")


@pytest.mark.parametrize(
    ("where", "name", "what"),
    [
        (tierload.engine.writing, "flatten", boom),
        (tierload.engine.writing, "plan_pages", boom),
        (memory.Arenas, "take", no_memory),
        (memory._native, "Arena", no_memory),
        (staging._native, "Staging", no_memory),
        (staging.Snapshot, "copy_now", boom),
        (background.guards, "guarded_memory", boom),
        (background.guards, "settles_later", boom),
        (background.leaving, "begins", boom),
        (background.leaving._native, "watch_termination", boom),
    ],
)
def test_a_call_that_fails(held: Store, where: Any, name: str, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises; nothing is in flight, and no memory is lost while the error is alive."""
    held.settings = replace(SMALL, host_budget_bytes=64 << 20)
    state = noise(1, 40 << 10)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, what)
        patch.setattr(held, "_plan", None)
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            held.async_save(state, step=1)
    assert not background.leaving._leaving.in_flight
    assert not background.guards._settling
    assert Beside(lambda: held.async_save(noise(2, 40 << 10), step=2).durable()).ends().step == 2
    assert caught.value.args
    held.settings = SMALL
    held.collect(keep=1)
    assert held.load()["number"] == 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Store, "write"),
        (Store, "write_draft"),
        (Store, "_committed"),
        (Store, "_device"),
        (staging.Snapshot, "check"),
        (tierload.engine.writing, "save_state"),
        (tierload.engine.saving, "encode_meta"),
    ],
)
def test_a_thread_that_meets_a_mistake(held: Failing, where: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, name, boom)
        pending = held.async_save(state_of(1), step=1)
        assert str(error_of(pending)) == "boom"
    with pytest.raises(RuntimeError, match="boom"):
        held.load()
    assert_works(held)


def test_a_handler_of_the_log_that_fails(held: Failing, capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("the handler is broken")

    handler = Broken()
    logging.getLogger("tierload").addHandler(handler)
    try:
        pending = held.fails()
        with pytest.raises(StoreIOError):
            pending.result()
        assert held.async_save(state_of(1), step=1).durable().step == 1
    finally:
        logging.getLogger("tierload").removeHandler(handler)
    assert "the handler is broken" in capfd.readouterr().err


@pytest.mark.parametrize("number", [3, torch.tensor(3), torch.arange(4).numpy()[3]])
def test_steps_of_other_types(held: Store, number: Any) -> None:
    pending = held.async_save(state_of(1), step=number)
    assert (type(pending.step), pending.durable().step) == (int, 3)
    assert held._background is not None
    assert all(thread.is_alive() for thread in held._background._threads)


@pytest.mark.parametrize("number", ["3", 2.5, 2**63])
def test_steps_that_are_none(held: Store, number: Any) -> None:
    for save in (held.save, held.async_save):
        with pytest.raises(tierload.InvalidRequest, match="step is"):
            save(state_of(1), step=number)


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "closed"])
def test_the_live_file_cannot_be_written(held: Store, kind: str) -> None:
    live = Path(held.path, "LIVE")
    if kind == "directory":
        live.mkdir()
    elif kind == "pipe":
        os.mkfifo(live)
    elif kind == "link":
        live.symlink_to(live.parent / "SUPER")
    before = (live.parent / "SUPER").read_bytes()
    held.settings = capped(0.1)
    assert Beside(lambda: held.async_save(state_of(1), step=1).durable()).ends().step == 1
    Beside(lambda: tierload.engine.live.look(held.path)).ends()
    assert_is(held.load(), 1)
    assert (live.parent / "SUPER").read_bytes() == before
    Beside(held.close).ends()


# -- waves


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("op", "at"), [("create", 1), ("write", 1), ("write", 5), ("sync", 1)])
def test_a_writer_that_fails_in_waves(held: Failing, op: str, at: int, threads: int) -> None:
    """The call that waits for it goes on."""
    held.settings = Settings(host_budget_bytes=64 << 20, threads=threads, on_failure="retry", max_segment_size_mb=16)
    held.arm(op, at)
    pending = Beside(lambda: held.async_save(noise(1, 80 << 10), step=1)).ends()
    with pytest.raises(StoreIOError):
        pending.result(LONG_S)
    assert held.calm()
    held.settings = SMALL
    assert_works(held)


def test_a_mistake_in_waves(held: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    held.settings = Settings(host_budget_bytes=64 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", boom)
        pending = Beside(lambda: held.async_save(noise(1, 80 << 10), step=1)).ends()
        with pytest.raises(RuntimeError, match="boom"):
            pending.result(LONG_S)
    held.settings = SMALL
    assert_works(held)
