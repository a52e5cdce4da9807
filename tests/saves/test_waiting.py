"""Waiting for a save: with asyncio, and by threads that give up waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import tierload
from tests.saves.training import held
from tierload import SaveCancelled, SaveReport, SaveTimeout


def state(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((20_000,), float(number))}


def test_a_loop_runs_on_while_it_awaits_a_save(store: Path) -> None:
    async def main() -> SaveReport:
        with held(store):
            pending = tierload.async_save(state(1), store, step=1)
            waiting = asyncio.create_task(report_of(pending))
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert not waiting.done()
        return await waiting

    async def report_of(pending: tierload.PendingSave) -> SaveReport:
        return await pending

    report = asyncio.run(main())
    assert report.commit.step == 1
    assert torch.equal(tierload.load(store)["w"], state(1)["w"])


def test_who_gives_up_awaiting_leaves_the_save_alone(store: Path) -> None:
    async def main() -> None:
        with held(store):
            pending = tierload.async_save(state(1), store, step=1)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pending, 0.01)
            task = asyncio.ensure_future(pending)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await pending).commit.step == 1
        assert (await tierload.async_save(state(2), store, step=2)).commit.step == 2

    asyncio.run(asyncio.wait_for(main(), 60))
    with tierload.open(store) as reader:
        assert [commit.step for commit in reader.commits()] == [2, 1]


def test_saves_that_an_event_loop_leaves_behind(store: Path) -> None:
    async def main() -> None:
        pending = tierload.async_save(state(1), store, step=1)
        left = asyncio.ensure_future(pending)
        await asyncio.sleep(0)
        assert not left.done()

    with held(store):
        asyncio.run(main())
    assert tierload.async_save(state(2), store, step=2).durable(60).step == 2
    assert len(tierload.open(store).commits()) == 2


def test_a_failure_is_raised_where_it_is_awaited(store: Path) -> None:
    async def main() -> None:
        with held(store):
            pending = tierload.async_save(state(1), store, step=1)
            cancelling = threading.Thread(target=pending.cancel)
            cancelling.start()
        with pytest.raises(SaveCancelled):
            await pending
        cancelling.join()

    asyncio.run(main())
    assert tierload.async_save(state(2), store, step=2).durable(60).step == 2


def test_a_wait_that_ends_too_early(store: Path) -> None:
    with held(store):
        pending = tierload.async_save(state(1), store, step=1)
        for wait in (pending.durable, pending.result):
            with pytest.raises(SaveTimeout, match="step 1"):
                wait(0.01)
        pending.staged(0)
        assert not pending.done()
    assert pending.durable(60).step == 1
    assert pending.done()
    assert pending.cancel() is False


def test_many_threads_save_into_one_store(store: Path) -> None:
    reports: list[SaveReport] = []

    def work(number: int) -> None:
        for turn in range(5):
            step = 10 * number + turn
            reports.append(tierload.async_save(state(step), store, step=step).result())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 20
    with tierload.open(store) as reader:
        for commit in reader.commits():
            assert torch.equal(reader.load(commit=commit)["w"], state(commit.step)["w"])


@pytest.mark.parametrize("guarded", [True, False])
def test_a_handle_that_is_dropped_is_gone(store: Path, guarded: bool) -> None:
    """Without a collection: training loops switch that off."""
    parameters = [torch.nn.Parameter(torch.rand(50_000)) for _ in range(4)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    if guarded:
        tierload.guard(optimizer)
    with held(store):
        pending = tierload.async_save(parameters, store)
        assert pending.snapshot is not None
        left = weakref.ref(pending), weakref.ref(pending.snapshot)
    pending.result()
    tierload.async_save([1], store).result()  # the thread that writes lets go of the one before
    gc.collect()
    gc.disable()
    try:
        del pending
        end = time.monotonic() + 60  # a thread of the store may be looking at it just now
        while any(each() for each in left) and time.monotonic() < end:
            time.sleep(0.01)
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()
