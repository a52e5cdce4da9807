"""A tiny state made durable, against one small file made durable."""

from __future__ import annotations

import torch

import tierload
from bench.flushes import CommitFlushes, one_file_durably
from bench.measuring import Figure, Result, Task, interleave, ratios


def test_tiny_save(benchmark, scale, folder, keep):
    result = Result(
        "tiny",
        "A tiny state made durable",
        "A state of one tensor of 64 floats and two numbers, which change each time. Against it: a file of 512 bytes, "
        "created, synced, renamed, and its folder synced; and the flushes of a commit alone. `record` is one small "
        "value between checkpoints.",
        folder,
    )
    state = {"step": 0, "loss": 2.5, "w": torch.zeros(64)}
    store = tierload.open(folder / "store", mode="w")
    store.save(state)
    flushes = CommitFlushes(folder, manifest_bytes=1024)

    def change() -> None:
        state["step"] += 1
        state["w"] += 1

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
