"""What waits for the saves in flight: by what it then finds. B08: and what does not see them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, state_of
from tests.saves.failing import HELD, Beside, capped, noise, until_writing
from tierload import CommitNotFound, InvalidRequest, PendingSave, SaveCancelled, Store

# -- what waits


@pytest.mark.parametrize(
    "call",
    [
        lambda three: three.load()["number"],
        lambda three: three.load(step=4)["number"],
        lambda three: three.load(tag="new")["number"],
        lambda three: three.wait() or three.head().step,
        lambda three: three.tag("newest") or three.tags()["newest"].step,
        lambda three: three.tag("four", 4) or three.tags()["four"].step,
        lambda three: three.rollback(steps=1).head.step,
        lambda three: three.rollback(2).head.step,
        lambda three: three.save(state_of(5), step=5).commit.step - 1,
        lambda three: three.close() or tierload.load(three.path)["number"],
        lambda three: three.__exit__(None, None, None) or tierload.load(three.path)["number"],
    ],
)
def test_waits(three: Store, call: Callable[[Store], object]) -> None:
    three.settings = capped(0.1)
    pending = three.async_save(state_of(4), step=4, tags=["new"])
    three.settings = SMALL
    assert not pending.done()
    assert Beside(lambda: call(three)).ends() == 4
    assert pending.done()
    assert pending.durable().step == 4


def test_a_with_block_ends_when_all_is_durable(store: Path) -> None:
    with tierload.open(store, mode="w", settings=capped(0.2, on_busy="queue")) as three:
        pending = [three.async_save(state_of(number), step=number) for number in (1, 2, 3)]
    assert all(save.done() for save in pending)
    assert_is(tierload.load(store), 3)


def test_closed(three: Store) -> None:
    """Nothing can be begun any more, and nothing waits for threads that have ended."""
    three.async_save(state_of(4), step=4)
    three.close()
    three.close()
    for call in (three.async_save, three.save, three.prepare):
        with pytest.raises(InvalidRequest, match="closed"):
            call(state_of(5))


def test_closed_by_one_thread_while_others_save(store: Path) -> None:
    """Each save is refused, or is durable; none is forgotten."""
    for round_ in range(10):
        three = Store(store, mode="w", settings=replace(SMALL, on_busy="queue"))
        pending: list[PendingSave] = []

        def save(three: Store = three, pending: list[PendingSave] = pending) -> None:
            for number in range(50):
                try:
                    pending.append(three.async_save(state_of(number)))
                except InvalidRequest:
                    return

        threads = [Beside(save) for _ in range(3)]
        while len(pending) < round_:
            pass
        Beside(three.close).ends()
        for thread in threads:
            thread.ends()
        durable = {one.durable().id for one in pending}
        with Store(store) as reader:
            assert durable <= {commit.id for commit in reader.commits()}


def test_a_history_that_is_looked_through_slowly_holds_nothing_up(three: Store) -> None:
    changes = iter(three.history())
    next(changes)
    assert Beside(lambda: three.async_save(state_of(4), step=4).durable().step).ends() == 4
    assert [change.kind for change in changes].count("commit") == 2


def test_a_reader_cannot_save(three: Store, store: Path) -> None:
    with Store(store) as reader:
        with pytest.raises(InvalidRequest, match="reading only"):
            reader.async_save(state_of(4))
        with pytest.raises(InvalidRequest, match="reading only"):
            reader.prepare(state_of(4))


# -- B08


def test_b08_a_load_right_after_the_call(store: Path) -> None:
    tierload.save(state_of(1), store, step=1, settings=capped(0.1))
    pending = tierload.async_save(state_of(2), store, step=2)
    with tierload.open(store) as reader:
        assert [commit.step for commit in reader.commits()] == [1]
        assert_is(reader.load(), 1)
    assert not pending.done()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply(_newest, (store,))
    assert other == 1 or pending.done()
    assert_is(tierload.load(store), 2)
    assert pending.done()
    assert _newest(store) == 2
    let_go(store)


def _newest(store: Path) -> int:
    with Store(store) as reader:
        return int(reader.load()["number"])  # type: ignore[index]


def test_b08_before_there_is_anything(store: Path) -> None:
    tierload.async_save(state_of(1), store, settings=capped(0.1))
    with Store(store) as reader:
        assert reader.commits() == []
        with pytest.raises(CommitNotFound):
            reader.load()
    assert_is(tierload.load(store), 1)


def test_the_cap_of_a_save_is_that_of_its_call(three: Store) -> None:
    three.settings = HELD
    pending = three.async_save(noise(4), step=4)
    three.settings = SMALL
    until_writing(pending)
    assert pending.cancel()
    with pytest.raises(SaveCancelled):
        pending.result()
