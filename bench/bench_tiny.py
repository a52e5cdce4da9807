"""A tiny state made durable, against one small file made durable."""

from __future__ import annotations

import pytest
import torch

import tierload
from bench.flushes import CommitFlushes, one_file_durably
from bench.measuring import Figure, Result, Task, interleave, ratios


@pytest.mark.parametrize("which", ["new", "old"])
def test_tiny_save(benchmark, scale, folder, keep, which):
    commits = scale.of(1000, 5) if which == "old" else 1
    result = Result(
        f"tiny-{which}",
        "A tiny state made durable" + (f", in a store of {commits:,} commits" if commits > 1 else ""),
        "A state of one tensor of 64 floats and two numbers, which change each time. Against it: a file of 512 bytes, "
        "created, synced, renamed, and its folder synced; and the flushes of a commit alone. `record` is one small "
        "value between checkpoints.",
        folder,
    )
    state = {"step": 0, "loss": 2.5, "w": torch.zeros(64)}
    store = tierload.open(folder / "store", mode="w")
    for step in range(commits):
        state["w"] += 1
        store.save(state, step=step, metrics={"loss": 1 / (step + 1), "lr": 1e-3})
    flushes = CommitFlushes(folder, manifest_bytes=1024)

    def change() -> None:
        state["step"] += 1
        state["w"] += 1  # a page, and so a segment file, in each save

    samples = interleave(
        benchmark,
        {
            "save": Task(lambda: store.save(state, step=state["step"])),
            "file": Task(lambda: one_file_durably(folder / "file", bytes(512))),
            "flushes": Task(flushes.commit),
            "record": Task(lambda: store.record("loss", state["step"])),
            "journal": Task(flushes.journal),
        },
        rounds=scale.of(51, 1),
        change=change,
    )
    result.samples = samples
    names = {
        "save": "tierload.save",
        "file": "file created, synced, renamed, folder synced",
        "flushes": "flushes of a commit alone",
        "record": "Store.record",
        "journal": "flushes of a journal record alone",
    }
    for key, name in names.items():
        result.add(Figure.milliseconds(name, samples, key))
    result.add(Figure.of("save ÷ file", ratios(samples["save"], samples["file"]), ""))
    keep(result)
    store.close()
