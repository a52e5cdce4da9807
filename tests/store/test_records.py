"""Recorded values, tags and metrics at their limits: what is refused is refused before anything is written, and what
was acknowledged can always be opened again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.state.alike import assert_alike
from tests.store.support import SMALL, catalog_of, in_child, writer
from tierload import Store, TierloadError

STATE = {"w": torch.arange(300), "n": 1}
MIB = 1 << 20


@pytest.mark.parametrize("keep", [1, 4])
def test_records_without_a_sync_are_durable_at_the_next_one_and_at_close(ram: Path, keep: int) -> None:
    with writer(ram / "store") as store:
        store.save(STATE, step=1)
        for number in range(keep):
            store.record(f"k{number}", number, sync=False)
        with tierload.open(ram / "store") as reader:
            assert reader.recorded() == {}, "nobody sees what may still be lost"
        assert store.recorded() == {f"k{number}": number for number in range(keep)}
    with tierload.open(ram / "store") as reader:
        assert reader.recorded() == {f"k{number}": number for number in range(keep)}


@pytest.mark.parametrize("then", ["save", "record", "tag", "rollback", "collect"])
def test_whatever_is_synced_takes_the_queued_records_with_it(ram: Path, then: str) -> None:
    calls: dict[str, Callable[[Store], Any]] = {
        "save": lambda store: store.save(STATE, step=2),
        "record": lambda store: store.record("other", 2),
        "tag": lambda store: store.tag("t"),
        "rollback": lambda store: store.rollback(lsn=store._native.last_lsn),
        "collect": lambda store: store.collect(keep=1),
    }
    with writer(ram / "store") as store:
        store.save(STATE, step=0)
        store.save(STATE, step=1)
        store.record("queued", 1, sync=False)
        calls[then](store)
        with tierload.open(ram / "store") as reader:
            # A rollback to what was durable undoes the queued value, in the same breath.
            assert ("queued" in reader.recorded()) == (then != "rollback")
            assert catalog_of(reader._native) == catalog_of(store._native)
            assert "queued" in [change.key for change in reader.history()]


BAD_REQUESTS: dict[str, Callable[[Store], Any]] = {
    "a tag without a name": lambda store: store.save({"n": 2}, step=2, tags=("",)),
    "a good and a bad tag": lambda store: store.save({"n": 2}, step=2, tags=("good", "")),
    "tag('')": lambda store: store.tag(""),
    "a tag of 65 MiB": lambda store: store.save({"n": 2}, step=2, tags=("x" * (65 * MIB),)),
    "a note of 65 MiB": lambda store: store.save({"n": 2}, step=2, note="x" * (65 * MIB)),
    "a tensor as a metric": lambda store: store.save({"n": 2}, step=2, metrics={"x": torch.ones(3)}),
    "a value of 65 MiB": lambda store: store.record("x", "y" * (65 * MIB)),
    "a tensor as a value": lambda store: store.record("x", torch.ones(3)),
    "something that cannot be stored": lambda store: store.save({"n": object()}, step=2),
    "a step that is too large": lambda store: store.save({"n": 2}, step=2**63),
    "a step that is a text": lambda store: store.save({"n": 2}, step="7"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_what_is_refused_changes_nothing(ram: Path, name: str) -> None:
    """Not the catalog, not the files, not even after the next record has been synced; and the writer works on."""

    def body() -> None:
        with writer(ram / "store") as store:
            store.save(STATE, step=1)
            before = catalog_of(store._native)
            files = {path.name for folder in ("seg", "man") for path in (ram / "store" / folder).iterdir()}
            with pytest.raises((TierloadError, TypeError, ValueError)):
                BAD_REQUESTS[name](store)
            assert [commit.step for commit in store.commits()] == [1]
            store.record("after", 1)
            assert [commit.step for commit in store.commits()] == [1]
            assert store.tags() == {}
            assert files == {path.name for folder in ("seg", "man") for path in (ram / "store" / folder).iterdir()}
            with tierload.open(ram / "store", settings=SMALL) as reader:
                assert reader.verify(full=True).ok, reader.verify(full=True).damages
                assert reader.recorded() == {"after": 1}
            store.rollback(lsn=2)
            assert len(catalog_of(store._native)) > len(before)
            store.save({"n": 3}, step=3)
        with writer(ram / "store") as store:
            assert_alike(store.load(), {"n": 3})

    outcome = in_child(body, seconds=20)
    assert not outcome.error, outcome.trace
    assert not outcome.signal


@pytest.mark.parametrize(
    "put",
    [
        lambda store, number: store.record(f"k{number}", "x" * (23 * MIB)),
        lambda store, number: store.record(f"k{number}", "x" * (23 * MIB), sync=number > 1),
        lambda store, number: store.save(STATE, step=number, note="x" * (23 * MIB)),
    ],
    ids=["values", "queued values", "notes"],
)
def test_a_catalog_that_outgrows_a_record_can_still_be_opened(ram: Path, put: Callable[[Store, int], Any]) -> None:
    """A SNAPSHOT is one record of at most 64 MiB; whatever is acknowledged must fit into the next one."""

    def body() -> tuple[dict[str, int], int]:
        refused = 0
        with writer(ram / "store") as store:
            store.save(STATE, step=0)
            for number in range(3):
                try:
                    put(store, number)
                except TierloadError:
                    refused += 1
            assert_alike(store.load(), STATE)
            kept = {key: len(str(value)) for key, value in store.recorded().items()}
            steps = [commit.step for commit in store.commits()]
        with tierload.open(ram / "store") as reader:
            assert {key: len(str(value)) for key, value in reader.recorded().items()} == kept
            assert [commit.step for commit in reader.commits()] == steps
        with writer(ram / "store") as store:
            assert {key: len(str(value)) for key, value in store.recorded().items()} == kept
            assert [commit.step for commit in store.commits()] == steps
            store.save({"n": 9}, step=9)
        assert_alike(tierload.load(ram / "store"), {"n": 9})
        return kept, refused

    outcome = in_child(body, seconds=40)
    assert not outcome.error, outcome.trace
    assert not outcome.signal


def test_odd_names_and_values(ram: Path) -> None:
    names = ["a/b", "../x", "é\udc80", "\0", " ", "x" * 5000, "#1", "~"]
    values = [None, True, -1, 2**80, 1.5, float("inf"), "né\0", b"\xff", (1, [2]), {"a": {3: 4}}, {1, 2}]
    with writer(ram / "store") as store:
        store.save(STATE, step=-5, tags=names)
        for number, name in enumerate(names):
            store.record(name, values[number % len(values)], step=-number)
        for number, value in enumerate(values):
            store.record(f"v{number}", value)
        expected = store.recorded()
    with tierload.open(ram / "store") as reader:
        assert_alike(reader.recorded(), expected)
        assert set(reader.tags()) == set(names)
        for name in names:
            assert_alike(reader.load(tag=name), STATE)
        for number, value in enumerate(values):
            assert_alike(reader.recorded()[f"v{number}"], value)
        assert reader.find(step=-5).head
