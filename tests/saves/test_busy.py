"""What may be done while saves are in flight, and what waits for them.

That something does not wait is shown by a save that would take hours and is still in flight afterwards; that something
waits, by its being there still when it has had a moment, and by what it then finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tierload
from tests.cases.stores import SMALL, assert_is, state_of, unreferenced
from tests.saves.failing import HELD, Beside, capped, in_flight, noise, running, until_writing
from tierload import SaveSkipped, Store


def steps(three: Store) -> list[int | None]:
    return [commit.step for commit in three.commits()]


# -- another save


def test_wait(three: Store) -> None:
    three.settings = HELD
    first = three.async_save(noise(4), step=4)
    until_writing(first)
    three.settings = SMALL
    second = Beside(lambda: three.async_save(state_of(5), step=5))
    assert second.waits()
    assert first.cancel()
    assert second.ends().durable().step == 5


def test_as_many_as_max_in_flight(three: Store) -> None:
    with in_flight(three, 4) as first:
        three.settings = replace(SMALL, max_in_flight=3)
        others = [three.async_save(state_of(number), step=number) for number in (5, 6)]
        fourth = Beside(lambda: three.async_save(state_of(7), step=7))
        assert fourth.waits()
        assert not any(pending.done() for pending in others)
        assert not first.done()
        assert others[0].cancel()
        fourth.ends()
    assert others[1].durable().step == 6
    assert fourth.ends().durable().step == 7
    assert steps(three) == [7, 6, 3, 2, 1]


def test_skip(three: Store, caplog: pytest.LogCaptureFixture) -> None:
    with in_flight(three, 4):
        three.settings = replace(SMALL, on_busy="skip")
        with caplog.at_level(logging.WARNING, "tierload"):
            for number in (5, 6):
                pending = three.async_save(state_of(number), step=number)
                assert pending.skipped
                with pytest.raises(SaveSkipped, match=f"step {number} "):
                    pending.result()
        assert three.skipped == 2
        assert [record.getMessage().count("was skipped") for record in caplog.records] == [1, 1]
    three.record("nothing", "is to be told")
    assert three.async_save(state_of(7), step=7).durable().step == 7
    assert three.skipped == 2
    assert steps(three) == [7, 3, 2, 1]


def test_a_skipped_save_is_no_failure_of_the_process(store: Path, tmp_path: Path) -> None:
    code = f"""
        import tierload
        from tests.saves.failing import *
        settings = replace(capped(0.1), on_busy="skip")
        first = tierload.async_save(noise(1, 64), {str(store)!r}, step=1, settings=settings)
        assert tierload.async_save(noise(2, 64), {str(store)!r}, step=2).skipped
    """
    with running(tmp_path, code) as run:
        assert run.ends() == 0
        assert "was skipped" in run.err
    assert tierload.load(store)["number"] == 1


def test_queue(three: Store) -> None:
    """The order of commits is that of the calls."""
    three.settings = capped(2.0, on_busy="queue")
    pending = [three.async_save(state_of(number), step=number) for number in range(4, 14)]
    assert not pending[-1].done()
    assert [save.durable().step for save in pending] == list(range(4, 14))
    assert steps(three) == list(range(13, 0, -1))
    for number in range(1, 14):
        assert_is(three.load(step=number), number)


def test_queue_within_the_memory_budget(three: Store) -> None:
    """Copies that do not fit beside the others wait for one that is written."""
    size = 24 << 10  # KiB: two of them are within 64 MiB, three are not
    three.settings = replace(SMALL, page_bytes=1 << 20)
    three.save(noise(0, size))
    budget = replace(SMALL, page_bytes=1 << 20, on_busy="queue", host_budget_bytes=64 << 20)
    three.settings = replace(budget, bandwidth_cap_mbps=0.001)
    first = three.async_save(noise(4, size), step=4)
    three.settings = budget
    second = three.async_save(noise(5, size), step=5)
    third = Beside(lambda: three.async_save(noise(6, size), step=6))
    assert third.waits()
    assert not first.done()
    assert not second.done()
    assert first.cancel()
    assert second.durable().step == 5
    assert third.ends().durable().step == 6
    assert three.load()["number"] == 6  # type: ignore[index]


# -- what does not wait


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda three: three.record("lr", 0.5) > 0, True),
        (lambda three: three.record("lr", 0.5, sync=False) > 0, True),
        (lambda three: three.recorded(), {}),
        (lambda three: [commit.step for commit in three.commits()], [3, 2, 1]),
        (lambda three: three.head().step, 3),
        (lambda three: three.find(step=2).step, 2),
        (lambda three: three.tags(), {}),
        (lambda three: three.tag("old", 2) or three.tags()["old"].step, 2),
        (lambda three: three.tag("old", three.find(step=1)) or three.tags()["old"].step, 1),
        (lambda three: len(three.collect(keep=1).dropped), 2),
        (lambda three: len(three.collect(keep=1, dry_run=True).dropped), 2),
        (lambda three: [change.kind for change in three.history()].count("commit"), 3),
        (lambda three: three.verify(full=True).ok, True),
        (lambda three: len(three.keys()) > 0, True),
        (lambda three: three.skipped, 0),
        (lambda three: three.closed, False),
    ],
)
def test_does_not_wait(three: Store, call: Callable[[Store], object], result: object) -> None:
    with in_flight(three, 4):
        assert Beside(lambda: call(three)).ends() == result


def test_records_and_collections_beside_a_save_are_there_afterwards(three: Store, store: Path) -> None:
    three.settings = capped(0.3)
    pending = three.async_save(noise(4, 256), step=4)
    count = 0
    while not pending.done():
        count += 1
        three.record("count", count, sync=count % 3 == 0)
        three.tag(f"t{count % 5}", 3)
        three.collect(keep=1)
    assert pending.durable().step == 4
    assert three.recorded() == {"count": count}
    assert steps(three) == [4, 3], "tagged"
    three.close()
    with Store(store) as reader:
        assert reader.recorded() == {"count": count}
        assert reader.load()["number"] == 4  # type: ignore[index]
        assert reader.verify(full=True).ok
    assert not unreferenced(store)


def test_the_parent_of_a_save_in_flight_is_collected(three: Store, store: Path) -> None:
    """Its pages are needed by the new commit, and stay."""
    state = noise(1, 256)
    three.save(state, step=4)
    three.save(noise(2, 16), step=5)
    three.rollback(4)
    three.settings = capped(0.05)
    pending = three.async_save(state | noise(3, 64), step=6)
    more = state | {"more": noise(3, 64)["noise"]}
    assert pending.cancel()
    pending = three.async_save(more, step=7)
    until_writing(pending)
    three.collect(keep=1)
    assert not pending.done()
    assert pending.durable().step == 7
    three.collect(keep=1)
    loaded = three.load()
    assert isinstance(loaded, dict)
    assert (loaded["noise"] == state["noise"]).all()
    assert three.verify(full=True).ok


def test_b20_the_loop_runs_on_while_many_tensors_are_written(store: Path) -> None:
    """Digests, compression and writing hold no lock of the interpreter: Python sees them move."""
    state = {f"layer.{number}": torch.randn(1000) for number in range(5000)}
    settings = tierload.Settings(compression="fast", page_bytes=1 << 18, bandwidth_cap_mbps=50)
    with Store(store, mode="w", settings=settings) as opened:
        pending = opened.async_save(state)
        seen: dict[int, int] = {}
        while not pending.done():
            written = pending.progress.written_bytes
            seen[written] = seen.get(written, 0) + 1
        assert len(seen) > 5
        assert sum(seen.values()) > 100
        assert torch.equal(opened.load()["layer.4999"], state["layer.4999"])  # type: ignore[index]
