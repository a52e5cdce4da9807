"""What may be done while saves are in flight, and what waits for them.

That something does not wait is shown by a save that would take hours and is still in flight afterwards; that something
waits, by its being there still when it has had a moment, and by what it then finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tierload
from tests.cases.stores import SMALL, assert_is, state_of, unreferenced
from tests.saves.failing import HELD, Beside, capped, in_flight, noise, running, until_writing
from tierload import SaveSkipped, Store


@pytest.fixture
def held(store: Path) -> Iterator[Store]:
    """A store with commits of 1, 2 and 3."""
    with Store(store, mode="w", settings=SMALL) as opened:
        for number in (1, 2, 3):
            opened.save(state_of(number), step=number)
        yield opened


def steps(held: Store) -> list[int | None]:
    return [commit.step for commit in held.commits()]


# -- another save


def test_wait(held: Store) -> None:
    held.settings = HELD
    first = held.async_save(noise(4), step=4)
    until_writing(first)
    held.settings = SMALL
    second = Beside(lambda: held.async_save(state_of(5), step=5))
    assert second.waits()
    assert first.cancel()
    assert second.ends().durable().step == 5


def test_as_many_as_max_in_flight(held: Store) -> None:
    with in_flight(held, 4) as first:
        held.settings = replace(SMALL, max_in_flight=3)
        others = [held.async_save(state_of(number), step=number) for number in (5, 6)]
        fourth = Beside(lambda: held.async_save(state_of(7), step=7))
        assert fourth.waits()
        assert not any(pending.done() for pending in others)
        assert not first.done()
        assert others[0].cancel()
        fourth.ends()
    assert others[1].durable().step == 6
    assert fourth.ends().durable().step == 7
    assert steps(held) == [7, 6, 3, 2, 1]


def test_skip(held: Store, caplog: pytest.LogCaptureFixture) -> None:
    with in_flight(held, 4):
        held.settings = replace(SMALL, on_busy="skip")
        with caplog.at_level(logging.WARNING, "tierload"):
            for number in (5, 6):
                pending = held.async_save(state_of(number), step=number)
                assert pending.skipped
                with pytest.raises(SaveSkipped, match=f"step {number} "):
                    pending.result()
        assert held.skipped == 2
        assert [record.getMessage().count("was skipped") for record in caplog.records] == [1, 1]
    held.record("nothing", "is to be told")
    assert held.async_save(state_of(7), step=7).durable().step == 7
    assert held.skipped == 2
    assert steps(held) == [7, 3, 2, 1]


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


def test_queue(held: Store) -> None:
    """The order of commits is that of the calls."""
    held.settings = capped(2.0, on_busy="queue")
    pending = [held.async_save(state_of(number), step=number) for number in range(4, 14)]
    assert not pending[-1].done()
    assert [save.durable().step for save in pending] == list(range(4, 14))
    assert steps(held) == list(range(13, 0, -1))
    for number in range(1, 14):
        assert_is(held.load(step=number), number)


def test_queue_within_the_memory_budget(held: Store) -> None:
    """Copies that do not fit beside the others wait for one that is written."""
    size = 24 << 10  # KiB: two of them are within 64 MiB, three are not
    held.settings = replace(SMALL, page_bytes=1 << 20)
    held.save(noise(0, size))
    budget = replace(SMALL, page_bytes=1 << 20, on_busy="queue", host_budget_bytes=64 << 20)
    held.settings = replace(budget, bandwidth_cap_mbps=0.001)
    first = held.async_save(noise(4, size), step=4)
    held.settings = budget
    second = held.async_save(noise(5, size), step=5)
    third = Beside(lambda: held.async_save(noise(6, size), step=6))
    assert third.waits()
    assert not first.done()
    assert not second.done()
    assert first.cancel()
    assert second.durable().step == 5
    assert third.ends().durable().step == 6
    assert held.load()["number"] == 6  # type: ignore[index]


# -- what does not wait


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda held: held.record("lr", 0.5) > 0, True),
        (lambda held: held.record("lr", 0.5, sync=False) > 0, True),
        (lambda held: held.recorded(), {}),
        (lambda held: [commit.step for commit in held.commits()], [3, 2, 1]),
        (lambda held: held.head().step, 3),
        (lambda held: held.find(step=2).step, 2),
        (lambda held: held.tags(), {}),
        (lambda held: held.tag("old", 2) or held.tags()["old"].step, 2),
        (lambda held: held.tag("old", held.find(step=1)) or held.tags()["old"].step, 1),
        (lambda held: len(held.collect(keep=1).dropped), 2),
        (lambda held: len(held.collect(keep=1, dry_run=True).dropped), 2),
        (lambda held: [change.kind for change in held.history()].count("commit"), 3),
        (lambda held: held.verify(full=True).ok, True),
        (lambda held: len(held.keys()) > 0, True),
        (lambda held: held.skipped, 0),
        (lambda held: held.closed, False),
    ],
)
def test_does_not_wait(held: Store, call: Callable[[Store], object], result: object) -> None:
    with in_flight(held, 4):
        assert Beside(lambda: call(held)).ends() == result


def test_records_and_collections_beside_a_save_are_there_afterwards(held: Store, store: Path) -> None:
    held.settings = capped(0.3)
    pending = held.async_save(noise(4, 256), step=4)
    count = 0
    while not pending.done():
        count += 1
        held.record("count", count, sync=count % 3 == 0)
        held.tag(f"t{count % 5}", 3)
        held.collect(keep=1)
    assert pending.durable().step == 4
    assert held.recorded() == {"count": count}
    assert steps(held) == [4, 3], "tagged"
    held.close()
    with Store(store) as reader:
        assert reader.recorded() == {"count": count}
        assert reader.load()["number"] == 4  # type: ignore[index]
        assert reader.verify(full=True).ok
    assert not unreferenced(store)


def test_the_parent_of_a_save_in_flight_is_collected(held: Store, store: Path) -> None:
    """Its pages are needed by the new commit, and stay."""
    state = noise(1, 256)
    held.save(state, step=4)
    held.save(noise(2, 16), step=5)
    held.rollback(4)
    held.settings = capped(0.05)
    pending = held.async_save(state | noise(3, 64), step=6)
    more = state | {"more": noise(3, 64)["noise"]}
    assert pending.cancel()
    pending = held.async_save(more, step=7)
    until_writing(pending)
    held.collect(keep=1)
    assert not pending.done()
    assert pending.durable().step == 7
    held.collect(keep=1)
    loaded = held.load()
    assert isinstance(loaded, dict)
    assert (loaded["noise"] == state["noise"]).all()
    assert held.verify(full=True).ok
