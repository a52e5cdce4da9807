"""Retention by metrics: the best commit, and the last good one, whatever ``keep`` says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.saves.failing import Beside
from tests.store.support import writer
from tests.store.test_line import Entry, as_commits, histories, seeded, state
from tierload import Commit, Store
from tierload.catalog import Line, choose_dropped
from tierload.errors import InvalidRequest

NAN, INF = math.nan, math.inf
losses = st.sampled_from([None, NAN, INF, -INF, 0.5, 1, 2.0, 3.5])


def good(commit: Commit) -> bool:
    return bool(commit.metrics) and all(math.isfinite(value) for value in commit.metrics.values())  # type: ignore[arg-type]


def with_losses(entries: list[Entry], found: list[float | None]) -> list[Commit]:
    commits = as_commits(entries, set())
    return [
        commit if loss is None else replace(commit, metrics={"loss": loss, "step": 1})
        for commit, loss in zip(commits, found, strict=True)
    ]


def left(commits: list[Commit], entries: list[Entry], keep: int, best: str | None) -> list[Commit]:
    sources = {entry.txid: entry.source for entry in entries if entry.rollback}
    line = Line(entries, entries[-1].txid)
    dropped = {commit.txid for commit in choose_dropped(commits, line, sources, keep=keep, keep_best=best)}
    return [commit for commit in commits if commit.txid not in dropped]


@seeded
@given(histories(), st.data(), st.integers(1, 3), st.sampled_from([None, "loss:min", "loss:max"]))
def test_the_last_good_and_the_best_of_the_line_stay(
    entries: list[Entry], data: st.DataObject, keep: int, best: str | None
) -> None:
    commits = with_losses(entries, data.draw(st.lists(losses, min_size=len(entries), max_size=len(entries))))
    kept = left(commits, entries, keep, best)
    line = [commit for commit in commits if not commit.superseded]
    newest_good = [commit for commit in line if good(commit)][-1:]
    assert all(commit in kept for commit in newest_good)
    finite = [commit.metrics["loss"] for commit in line if math.isfinite(commit.metrics.get("loss", NAN))]  # type: ignore[arg-type]
    if best and finite:
        wanted = min(finite) if best == "loss:min" else max(finite)  # type: ignore[type-var]
        assert wanted in [commit.metrics.get("loss") for commit in kept if not commit.superseded]
    without = left(as_commits(entries, set()), entries, keep, best)
    extra = {commit.txid for commit in kept} - {commit.txid for commit in without}
    assert len([txid for txid in extra if not next(c for c in commits if c.txid == txid).source]) <= 2, "no others"


def test_whole_numbers_of_any_size_are_finite() -> None:
    entries = [Entry(1), Entry(2), Entry(3)]
    commits = with_losses(entries, [10**400, -(10**400), NAN])  # type: ignore[list-item]
    assert left(commits, entries, 1, "loss:max") == commits


@seeded
@given(st.lists(losses, min_size=1, max_size=12), st.integers(1, 3))
def test_a_run_that_collects_after_every_save_has_them_for_ever(found: list[float | None], keep: int) -> None:
    """The best and the last good of all that there ever were, however old they are by now."""
    commits: list[Commit] = []
    for number, loss in enumerate(found, 1):
        entries = [*(Entry(commit.txid) for commit in commits), Entry(number)]
        before = [commit.metrics.get("loss") for commit in commits]
        commits = left(with_losses(entries, [*before, loss]), entries, keep, "loss:min")  # type: ignore[list-item]
    finite = [(loss, number) for number, loss in enumerate(found, 1) if loss is not None and math.isfinite(loss)]
    kept = {commit.txid for commit in commits}
    if finite:
        assert max(number for _, number in finite) in kept, "the last good one"
        assert min(finite)[0] in [commit.metrics.get("loss") for commit in commits], "the best one"
    assert len(kept) <= keep + 2


@pytest.mark.parametrize("best", ["loss", "", ":min", "loss:lowest", "loss:"])
def test_which_values_are_better_has_to_be_said(ram: Path, best: str) -> None:
    with writer(ram / "store") as store:
        store.save(state(1))
        with pytest.raises(InvalidRequest, match="which values are better"):
            store.collect(keep=1, keep_best=best)
        with pytest.raises(InvalidRequest, match="need keep"):
            store.collect(keep_best="loss:min")


def test_a_run_that_went_to_nan_can_be_taken_back(ram: Path) -> None:
    with writer(ram / "store") as store:
        for number, metrics in enumerate(
            [{"loss": 1.0}, {"loss": 3.0}, {"loss": NAN}, {}, {"loss": 2.0, "norm": INF}, {}], 1
        ):
            store.save(state(number), step=number, metrics=metrics)
            store.collect(keep=2, keep_best="loss:min")
        assert [commit.step for commit in store.commits()] == [6, 5, 2, 1]
        assert store.rollback(2).commit is not None
        store.collect(keep=1, keep_best="loss:min")
        assert [commit.step for commit in store.commits()] == [2, 1]
        assert store.load()["n"] == 2  # type: ignore[index]


def test_a_save_is_begun_while_a_collection_removes_files(ram: Path) -> None:
    with Store(ram / "store", mode="w") as store:
        store.async_save(state(1), step=1).durable()
        with store._lock:  # as a collection holds it
            pending = Beside(lambda: store.async_save(state(2), step=2)).ends()
            assert not pending.done()
        assert pending.durable().step == 2
