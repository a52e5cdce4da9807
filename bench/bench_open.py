"""Opening a store with a long history."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierload
from bench.measuring import Figure, Result, Task, drop_cached, interleave, take_turns

_JOURNAL_BYTES = 16 << 20  # where a journal is closed and a new one begun: the most that an open has to replay
_HOW = (
    "`tierload.open(path)` and `head()`, in a process that has imported torch. *As written*: the journal is as the "
    "process that wrote it left it, record by record. *Reopened*: it begins with a snapshot of all commits, as after "
    "every open for writing. Cold: the store's files were taken out of the page cache (posix_fadvise DONTNEED after an "
    "fsync). Opening for writing begins a new epoch, with its flushes."
)


@pytest.mark.parametrize("which", ["commits", "records"])
def test_open(benchmark, scale, folder, keep, which):
    path = folder / "store"
    commits = scale.of(1000, 5) if which == "commits" else 3
    # A record holds the value before and the one after.
    records = 0 if which == "commits" else scale.of(_JOURNAL_BYTES - (1 << 20), 1 << 15) // 2200
    title = f"Opening a store of {commits:,} commits"
    if records:
        title += f" and {records:,} recorded values of 1 kB, which nearly fill its journal"
    result = Result(f"open-{which}", title, _HOW, folder)
    _fill(path, commits, records)

    def read() -> None:
        with tierload.Store(path) as store:
            store.head()

    def read_all() -> None:
        with tierload.Store(path) as store:
            assert len(store.commits()) == commits

    def write() -> None:
        with tierload.Store(path, mode="w") as store:
            store.head()

    rounds = scale.of(11, 1)
    reading = {
        "reading, warm": Task(read),
        "reading, cold": Task(read, before=lambda: drop_cached(path)),
        "reading and listing all commits, warm": Task(read_all),
    }
    written = take_turns(reading, rounds=rounds)
    tasks = {"writing, warm": Task(write), **reading}
    reopened = interleave(benchmark, tasks, rounds=rounds)
    limit = 50.0 if which == "commits" else None
    for when, samples in (("as written", written), ("reopened", reopened)):
        result.samples |= {f"{name}, {when}": seconds for name, seconds in samples.items()}
        for name in reading if when == "as written" else tasks:
            result.add(Figure.milliseconds(f"{name}; {when}", samples, name, limit=limit))
    keep(result)


def _fill(path: Path, commits: int, records: int) -> None:
    state = {"w": torch.zeros(64)}
    with tierload.Store(path, mode="w") as store:
        for step in range(commits):
            state["w"] += 1
            store.save(state, step=step, metrics={"loss": 1 / (step + 1), "lr": 1e-3})
        for number in range(records):
            store.record(f"note {number % 50}", "x" * 1000, sync=number == records - 1)
