"""The head's line and retention: what a rollback leaves behind, and what may be dropped without changing the line.

`reference` is the definition: a commit continues the one that was head before it, a rollback continues its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tierload
from tests.store.support import SMALL, writer
from tierload import Commit, CommitNotFound
from tierload.catalog import Line, choose_dropped
from tierload.errors import InvalidRequest

# Shrinking takes minutes here, and a history of 18 commits can be read.
seeded = settings(max_examples=150, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


@dataclass(frozen=True)
class Entry:
    txid: int
    source: int = 0
    step: int | None = None

    @property
    def rollback(self) -> bool:
        return self.source != 0


def reference(entries: list[Entry]) -> list[int]:
    """The line, newest first, by following what each commit continues."""
    by_txid = {entry.txid: entry for entry in entries}
    order = sorted(by_txid)
    line: list[int] = []
    at = order[-1] if order else 0
    while at:
        line.append(at)
        source = by_txid[at].source
        before = [txid for txid in order if txid < at]
        at = source or (before[-1] if before else 0)
    return line


def reference_positions(entries: list[Entry]) -> list[int]:
    """The line without the sources that rollbacks on it restored."""
    by_txid = {entry.txid: entry for entry in entries}
    line = reference(entries)
    return [txid for number, txid in enumerate(line) if not number or by_txid[line[number - 1]].source != txid]


def as_commits(entries: list[Entry], tagged: set[int]) -> list[Commit]:
    """As the catalog's face shows them: ids of what is there, and None for a source that was collected."""
    line = Line(entries, entries[-1].txid)
    there = {entry.txid for entry in entries}
    return [
        Commit(
            id=f"{entry.txid:032x}",
            txid=entry.txid,
            lsn=entry.txid,
            step=entry.step,
            parent=None,
            source=f"{entry.source:032x}" if entry.source in there else None,
            time=0.0,
            raw_bytes=0,
            written_bytes=0,
            superseded=entry.txid not in line,
            head=entry is entries[-1],
            tags=("t",) if entry.txid in tagged else (),
        )
        for entry in entries
    ]


def chosen(entries: list[Entry], tagged: set[int], keep: int, every: int | None = None) -> set[int]:
    """The txids that a retention drops."""
    line = Line(entries, entries[-1].txid)
    sources = {entry.txid: entry.source for entry in entries if entry.rollback}
    dropped = choose_dropped(as_commits(entries, tagged), line, sources, keep=keep, keep_every=every)
    return {commit.txid for commit in dropped}


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    """Saves, and rollbacks to anything that was there: superseded commits and other rollbacks too."""
    entries: list[Entry] = []
    for _ in range(draw(st.integers(1, 18))):
        txid = (entries[-1].txid if entries else 0) + draw(st.integers(1, 2))
        source = draw(st.sampled_from(entries)) if entries and draw(st.booleans()) else None
        step = source.step if source else draw(st.one_of(st.none(), st.integers(-3, 12)))
        entries.append(Entry(txid, source.txid if source else 0, step))
    return entries


@seeded
@given(histories())
def test_the_line_is_what_the_head_continues(entries: list[Entry]) -> None:
    line = Line(entries, entries[-1].txid)
    assert line.txids == reference(entries)
    assert line.positions == reference_positions(entries)
    assert {entry.txid for entry in entries if entry.txid in line} == set(line.txids)


@seeded
@given(histories(), st.data())
def test_collecting_never_changes_the_line(entries: list[Entry], data: st.DataObject) -> None:
    """Several collections, with saves and rollbacks between them; the kept commits stay on, or off, the line."""
    everything = list(entries)
    kept = list(entries)
    tagged = set(data.draw(st.sets(st.sampled_from([entry.txid for entry in entries]), max_size=4)))
    for _ in range(data.draw(st.integers(1, 4))):
        keep = data.draw(st.integers(1, 6))
        every = data.draw(st.one_of(st.none(), st.integers(1, 5)))
        before = Line(kept, kept[-1].txid)
        dropped = chosen(kept, tagged, keep, every)
        assert kept[-1].txid not in dropped, "the head"
        assert not dropped & tagged
        assert not dropped & set(before.positions[:keep])
        steps = {entry.txid: entry.step for entry in kept}
        for txid in before.txids:
            step = steps[txid]
            assert every is None or step is None or step % every or txid not in dropped
        refused = [entry for entry in kept if entry.txid in dropped and refuses(entry, kept, dropped)]
        assert not refused, f"the native core refuses to drop {refused}"
        kept = [entry for entry in kept if entry.txid not in dropped]
        after = Line(kept, kept[-1].txid)
        assert after.txids == [txid for txid in before.txids if txid not in dropped]
        assert set(after.txids) == set(reference(everything)) & {entry.txid for entry in kept}
        assert after.positions[: min(keep, len(before.positions))] == before.positions[:keep]
        for _ in range(data.draw(st.integers(0, 3))):
            source = data.draw(st.sampled_from(kept)).txid if data.draw(st.booleans()) else 0
            entry = Entry(everything[-1].txid + 1, source, data.draw(st.integers(0, 12)))
            everything.append(entry)
            kept.append(entry)


def refuses(entry: Entry, kept: list[Entry], dropped: set[int]) -> bool:
    """A rollback has to stay while a commit that it left behind does."""
    return entry.rollback and any(entry.source < e.txid < entry.txid and e.txid not in dropped for e in kept)


@seeded
@given(histories(), st.integers(-3, 0))
def test_keeping_nothing_is_refused(entries: list[Entry], keep: int) -> None:
    with pytest.raises(InvalidRequest):
        chosen(entries, set(), keep)
    with pytest.raises(InvalidRequest):
        chosen(entries, set(), 1, keep)


# -- the same on a store


def state(number: int) -> dict[str, object]:
    return {"w": torch.full((300,), number), "n": number}


def test_what_a_rollback_leaves_behind(ram: Path) -> None:
    with writer(ram / "store") as store:
        ids = {number: store.save(state(number), step=number).commit.id for number in range(1, 5)}
        plan = store.rollback(2)
        assert [commit.step for commit in plan.superseded] == [4, 3]
        assert [(commit.step, commit.superseded) for commit in store.commits()] == [
            (2, False), (4, True), (3, True), (2, False), (1, False),
        ]  # fmt: skip
        with pytest.raises(CommitNotFound, match=ids[4][:12]):
            store.find(step=4)
        assert store.load(commit=ids[4])["n"] == 4
        ids[5] = store.save(state(5), step=3).commit.id  # resuming goes on from step 2, and step 3 is a new one
        assert store.load(step=3)["n"] == 5
        assert store.find(step=3).id == ids[5]
        assert store.load(commit=ids[3])["n"] == 3
        assert [commit.step for commit in store.commits() if not commit.superseded] == [3, 2, 2, 1]


def test_a_rollback_is_one_step_that_can_be_undone(ram: Path) -> None:
    with writer(ram / "store") as store:
        ids = [store.save(state(number), step=number).commit.id for number in range(1, 5)]
        store.rollback(steps=2)
        assert store.load()["n"] == 2
        store.rollback(ids[3])
        assert store.load()["n"] == 4
        store.rollback(steps=1)
        assert store.load()["n"] == 3, "a rollback and the commit that it restored are one position"
        with pytest.raises(CommitNotFound):
            store.rollback(steps=3)
        head = store.head()
        assert head is not None
        for number, commit in enumerate(ids, 1):
            store.rollback(commit)
            assert store.load()["n"] == number
        store.rollback(head)
        assert store.load()["n"] == 3


def test_a_plan_names_what_will_no_longer_be_on_the_line(ram: Path) -> None:
    """From one branch to the tip of another: what both have in common is not left behind."""
    with writer(ram / "store") as store:
        ids = [store.save(state(number), step=number).commit.id for number in range(1, 4)]
        store.rollback(ids[1])
        other = store.save(state(9), step=9).commit
        plan = store.rollback(ids[2], dry_run=True)
        named = {commit.id for commit in plan.superseded}
        line = {commit.id for commit in store.commits() if not commit.superseded}
        store.rollback(ids[2])
        left = line - {commit.id for commit in store.commits() if not commit.superseded}
        assert other.id in left
        assert named == left


def test_retention_goes_on_after_the_source_of_a_rollback_is_gone(ram: Path) -> None:
    """A tagged commit that was left behind keeps the rollback, however often one collects."""
    with writer(ram / "store") as store:
        for number in (1, 2):
            store.save(state(number), step=number)
        left = store.save(state(3), step=3, tags=("spike",)).commit.id
        store.rollback(2)
        for number in range(4, 9):
            store.save(state(number), step=number)
            store.collect(keep=1)
            assert store.load()["n"] == number
            assert store.load(tag="spike")["n"] == 3
            assert {commit.id: commit.superseded for commit in store.commits()}[left] is True
    with tierload.open(ram / "store", settings=SMALL) as reader:
        assert reader.verify(full=True).ok
        assert next(commit.step for commit in reader.commits() if not commit.superseded) == 8


def test_head_and_tagged_commits_are_never_dropped(ram: Path) -> None:
    with writer(ram / "store") as store:
        for number in range(1, 5):
            store.save(state(number), step=number, tags=("best",) if number == 2 else ())
        for refused in ([4], [2], [1, 4], [99]):
            with pytest.raises(InvalidRequest):
                store._native.collect(refused)
        assert len(store.commits()) == 4
        store.collect(keep=1)
        assert [commit.step for commit in store.commits()] == [4, 2]
        store.tag("best", remove=True)
        store.collect(keep=1)
        assert [commit.step for commit in store.commits()] == [4]
        store.collect(keep=1)
        assert store.load()["n"] == 4
        with pytest.raises(InvalidRequest):
            store.collect(keep=0)
