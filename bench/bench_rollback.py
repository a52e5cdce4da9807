"""A rollback: small or large state, few or very many tensors, one commit or a thousand back."""

from __future__ import annotations

import pytest
import torch

import tierload
from bench.flushes import CommitFlushes
from bench.measuring import Figure, Result, Task, interleave, median
from bench.traced import HAS_STRACE, apart_from_flushes

_HOW = (
    "A store with two states is rolled back to the one and to the other in turn, by id. `apart from fsync`: the same "
    "in a process of its own under strace, which stops it at flushes only; the time in which no thread was in one. "
    "`flushes`: those of one journal record alone, on the same disk in the same rounds."
)


@pytest.mark.parametrize("which", ["tiny", "large", "tensors", "commits"])
def test_rollback(benchmark, scale, folder, keep, request, which):
    commits = 2
    if which == "large":
        state, title = request.getfixturevalue("large"), "a state of 1 GiB"
    elif which == "tensors":
        count = scale.of(100_000, 50)
        state, title = {f"t{n}": torch.zeros(4) for n in range(count)}, f"a state of {count:,} tensors"
    else:
        state, title = {"w": torch.zeros(64)}, "a tiny state"
        if which == "commits":
            commits = scale.of(1000, 5)
            title += f", {commits - 1} commits back"
    result = Result(f"rollback-{which}", f"Rollback: {title}", _HOW, folder)
    path = folder / "store"
    first = next(iter(state.values()))
    ids = []
    with tierload.Store(path, mode="w") as store:
        for step in range(commits):
            first.view(-1)[0] = step + 1  # one page differs
            ids.append(store.save(state, step=step, metrics={"loss": 1 / (step + 1)}).commit.id)
    targets = [ids[0], ids[-1]]
    rounds = scale.of(11, 2)
    traced = []
    if HAS_STRACE and (scale.real or which == "tiny"):
        traced = apart_from_flushes("bench.rollbacks", [path, rounds, *targets], folder / "trace")

    flushes = CommitFlushes(folder, 0)
    with tierload.Store(path, mode="w") as store:

        def back() -> None:
            targets.reverse()
            store.rollback(targets[0])

        samples = interleave(
            benchmark, {"rollback": Task(back), "flushes": Task(flushes.journal)}, rounds=scale.of(11, 1)
        )
        assert store.head().source == targets[0]
    result.samples = samples | {
        f"traced {key}": [each[key] for each in traced] for key in ("seconds", "rest", "flushes")
    }
    result.add(Figure.milliseconds("Store.rollback", samples, "rollback"))
    result.add(Figure.milliseconds("flushes of a journal record alone", samples, "flushes"))
    if traced:
        rest = [each["rest"] * 1e3 for each in traced]
        note = f"{median([each['flushes'] for each in traced]):g} flushes"
        result.add(Figure.of("Store.rollback apart from fsync", rest, "ms", limit=20.0, note=note))
    keep(result)
