"""A handle of a save in tasks, threads and a forked child; and one that nobody keeps."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from dataclasses import replace

import pytest

from tests.cases.stores import SMALL, assert_is, state_of
from tests.saves.failing import HELD, Beside, Failing, capped, child_ends, in_flight, noise
from tierload import (
    InvalidRequest,
    PendingSave,
    SaveCancelled,
    SaveSkipped,
    StoreIOError,
)

# -- asyncio


def test_awaited(held: Failing) -> None:
    held.settings = capped(0.1)

    async def main() -> tuple[int | None, int]:
        turns = 0

        async def ticking() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        ticks = asyncio.create_task(ticking())
        pending = held.async_save(state_of(1), step=1)
        report = await pending
        ticks.cancel()
        assert (await pending).commit.id == report.commit.id
        return report.commit.step, turns

    step, turns = asyncio.run(main())
    assert step == 1
    assert turns > 10, "the event loop went on meanwhile"


def test_an_awaited_failure(held: Failing) -> None:
    async def main() -> None:
        await held.fails()

    with pytest.raises(StoreIOError):
        asyncio.run(main())
    held.record("x", 1)  # it was told


def test_who_gives_up_awaiting_is_told_of_a_failure_later(held: Failing) -> None:
    async def main(pending: PendingSave) -> None:
        task = asyncio.ensure_future(pending)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main(held.fails()))
    with pytest.raises(StoreIOError):
        held.record("x", 1)


# -- threads and processes


def test_used_by_several_threads(held: Failing) -> None:
    with in_flight(held) as pending:
        threads = [Beside(call) for call in (pending.result, pending.durable, pending.result)]
        staged = Beside(pending.staged)
        staged.ends()
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        with pytest.raises(SaveCancelled):
            thread.ends()


def test_in_a_forked_child(held: Failing) -> None:
    """Everything that would wait for threads of the parent is refused, and what was being copied is the parent's."""

    def child() -> None:
        calls = (pending.staged, pending.result, pending.durable, pending.cancel, lambda: asyncio.run(awaited()))
        calls += (lambda: held.async_save(state_of(2)), lambda: held.save(state_of(2)), lambda: held.record("x", 1))
        calls += (lambda: held.prepare(1), lambda: pending.mutating().__enter__())
        for call in calls:
            try:
                call()
            except InvalidRequest as error:
                assert "process" in str(error)  # noqa: PT017
            else:
                os._exit(2)
        assert pending.progress.total_bytes > 0
        assert not pending.done()
        assert_is(held.load(), 0)
        held.commits()
        held.close()

    async def awaited() -> None:
        await pending

    with in_flight(held) as pending:
        number = os.fork()
        if number == 0:
            signal.alarm(60)
            try:
                child()
                os._exit(0)
            finally:
                os._exit(1)
        assert child_ends(number) == 0
    assert held.async_save(state_of(3)).durable()


def test_a_handle_that_nobody_keeps(held: Failing) -> None:
    assert held.async_save(state_of(1), step=1)
    assert_is(held.load(), 1)
    pending = held.fails()
    del pending
    gc.collect()
    with pytest.raises(StoreIOError, match=r"write"):
        held.load()
    held.load()


def test_a_handle_that_somebody_keeps_keeps_no_copy(held: Failing) -> None:
    held.settings = replace(SMALL, on_busy="queue")
    kept = [held.async_save(noise(number), step=number) for number in range(3)]
    for pending in kept:
        pending.result()
        assert pending.snapshot is None
        assert pending.progress.staged_bytes >= 1 << 20


def test_a_skipped_save(held: Failing) -> None:
    with in_flight(held):
        held.settings = replace(SMALL, on_busy="skip")
        pending = held.async_save(state_of(2), step=2)
        assert pending.skipped
        assert pending.done()
        assert pending.cancel() is False
        for call in (pending.result, pending.durable, pending.staged):
            with pytest.raises(SaveSkipped, match="step 2"):
                call()
        assert pending.progress.phase == "skipped"


def test_mutating_waits_for_nothing_that_is_copied(held: Failing) -> None:
    state = state_of(1)
    with in_flight(held):
        held.settings = replace(HELD, on_busy="queue")
        pending = held.async_save(state, step=1)
        with pending.mutating():
            state["w"].zero_()
        assert pending.cancel()
