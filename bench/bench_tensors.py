"""Very many tensors: what a save and a load cost when the bytes do not count."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import torch

import tierload
from bench.loops import linear_layers
from bench.many import many_tensors
from bench.measuring import CPU, Figure, Result, Task, interleave, median, ratios
from bench.stage import ROOT, environment
from bench.versus import torch_save_durably
from tierload.layout import ManifestTable, plan_pages
from tierload.layout.rows import PAGE_ROW
from tierload.state import flatten
from tierload.types import ChunkTable, Destinations, FlatState

_MIB = 1 << 20


def test_hundred_thousand(benchmark, scale, folder, keep):
    count = scale.of(100_000, 300)
    result = Result(
        "tensors",
        f"{count:,} small tensors",
        "Scalars of float32 in one dict, each with a storage of its own. All tasks run in turn, in one process; saves "
        "are durable, `torch.save` is too (synced and renamed). `load` makes new tensors, `load into` fills the ones "
        "that there are. `open and look up` opens the store, verifies the manifest and finds one key; it is warm: the "
        "same was done just before.",
        folder,
    )
    state = many_tensors(count)
    store = tierload.open(folder / "store", mode="w")
    store.save(state)
    file = folder / "file.pt"
    kept: list[object] = []

    def look_up() -> None:
        with tierload.open(folder / "store") as reader:
            assert reader.info(f"layer.{count // 2}.weight").nbytes == 4

    samples = interleave(
        benchmark,
        {
            "save": Task(lambda: store.save(state), before=lambda: _change(state)),
            "torch.save": Task(lambda: torch_save_durably(state, file)),
            "load": Task(lambda: kept.append(store.load()), after=kept.clear),
            "torch.load": Task(lambda: kept.append(torch.load(file)), after=kept.clear),
            "load into": Task(lambda: store.load(into=state)),
            "open and look up": Task(look_up, before=look_up),
        },
        rounds=scale.of(5, 1),
    )
    result.samples = samples
    result.add(Figure.milliseconds("save, with one tensor changed", samples, "save", limit=500))
    result.add(Figure.milliseconds("torch.save", samples, "torch.save"))
    result.add(Figure.of("torch.save over save", ratios(samples["torch.save"], samples["save"]), "times"))
    result.add(Figure.milliseconds("load", samples, "load", limit=500))
    result.add(Figure.milliseconds("torch.load", samples, "torch.load"))
    result.add(Figure.of("torch.load over load", ratios(samples["torch.load"], samples["load"]), "times"))
    result.add(Figure.milliseconds("load into", samples, "load into", limit=500))
    result.add(Figure.milliseconds("open and look up", samples, "open and look up", limit=2))
    keep(result)
    store.close()


def _change(state: dict[str, torch.Tensor]) -> None:
    state["layer.0.weight"] += 1


def test_growth(benchmark, scale, folder, keep):
    few, many = scale.of(100_000, 100), scale.of(1_500_000, 1_500)
    result = Result(
        "tensors-growth",
        f"{few:,} and {many:,} small tensors",
        "Each size in a process of its own, in turn: seconds, and by how much memory grew at the most (VmHWM less "
        "VmRSS before; of a load, with the new tensors). `growth` is how many times as long the larger state took, "
        "over how many times as many tensors it has: 1 is linear.",
        folder,
    )
    rounds: dict[int, list[dict[str, tuple[float, int]]]] = {few: [], many: []}

    def one_round() -> None:
        for count, found in rounds.items():
            command = [sys.executable, "-m", "bench.many", str(folder), str(count)]
            done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            found.append(json.loads(done.stdout))

    benchmark.pedantic(one_round, rounds=scale.of(3, 1))
    for name in rounds[few][0]:
        seconds = {count: [one[name][0] for one in found] for count, found in rounds.items()}
        for count, found in rounds.items():
            result.samples[f"{name}, {count:,}"] = seconds[count]
            result.add(Figure.of(f"{name}, {count:,}", seconds[count], "s"))
            result.add(Figure.of(f"{name}, {count:,}: memory", [one[name][1] / _MIB for one in found], "MiB"))
        growth = median(seconds[many]) / median(seconds[few]) / (many / few)
        result.add(Figure(f"{name}: growth", growth, "times"))
    keep(result)


def test_shards(benchmark, scale, folder, keep):
    tensors, shards = scale.of(1000, 10), scale.of(512, 8)
    result = Result(
        "tensors-shards",
        f"{tensors:,} tensors of {shards} shards",
        "A synthetic table of chunks, each one shard of a bfloat16 matrix of 4096 by 4096: planning the pages of all "
        "of them, and the reads of one rank and of all. Bytes are never touched.",
        folder,
    )
    flat = synthetic(tensors, shards)
    plan = plan_pages(flat, _MIB, 1 << 15)
    pages = np.zeros(len(plan.parts_of_page), PAGE_ROW)
    pages["raw_length"] = plan.lengths  # no page is packed
    sections = pages.view(np.uint8), plan.rows.view(np.uint8), flat.chunks.dims.view(np.uint8)
    table = ManifestTable(*sections, np.frombuffer(flat.chunks.keys, np.uint8))
    every = np.arange(tensors * shards)
    one_rank = Destinations(every[::shards], np.zeros(tensors, np.uint64), None)
    all_ranks = Destinations(every, np.zeros(len(every), np.uint64), None)
    samples = interleave(
        benchmark,
        {
            "plan": Task(lambda: plan_pages(flat, _MIB, 1 << 15)),
            "again": Task(lambda: plan.again(flat, _MIB, 1 << 15)),
            "one rank": Task(lambda: table.plan_reads(one_rank)),
            "all ranks": Task(lambda: table.plan_reads(all_ranks)),
        },
        rounds=scale.of(7, 1),
    )
    result.samples = samples
    note = f"{len(every):,} chunks, {len(pages):,} pages"
    result.add(Figure.milliseconds("planning the pages of all chunks", samples, "plan", note=note))
    result.add(Figure.milliseconds("the same again", samples, "again"))
    result.add(Figure.milliseconds("planning the reads of one rank", samples, "one rank"))
    result.add(Figure.milliseconds("planning the reads of all", samples, "all ranks"))
    held = sum(array.nbytes for array in (plan.rows, plan.lengths, plan.pointers, plan.owners, plan.starts, pages))
    result.add(Figure("arrays of the plan and the manifest", (held + flat.chunks.dims.nbytes) / _MIB, "MiB"))
    assert all(name.endswith(CPU) or len(values) for name, values in samples.items())
    keep(result)


def test_model(benchmark, scale, folder, keep):
    layers = scale.of(1200, 12)
    result = Result(
        "tensors-model",
        f"A model of {layers:,} layers and its AdamW",
        f"What a save does before it looks at bytes: walking a state of {3 * layers:,} tensors of 64 by 64 and as many "
        "steps as parameters, when an earlier one was the same. `model` and `optimizer` are torch's objects; `dict` is "
        "what their `state_dict()` gave, which took its time before.",
        folder,
    )
    model, optimizer = linear_layers(layers, 64)
    objects = {"model": model, "optimizer": optimizer, "epoch": 1}
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    outlines = flatten(objects).outline, flatten(plain).outline
    again: list[FlatState] = []

    def check() -> None:
        assert all(flat.outline in outlines and len(flat.chunks) == 4 * layers for flat in again)
        again.clear()

    samples = interleave(
        benchmark,
        {
            "objects": Task(lambda: again.append(flatten(objects, like=outlines[0])), after=check),
            "dict": Task(lambda: again.append(flatten(plain, like=outlines[1])), after=check),
            "state_dict()": Task(lambda: (model.state_dict(), optimizer.state_dict())),
        },
        rounds=scale.of(101, 1),
    )
    result.samples = samples
    title = f"flatten of model + AdamW, {3 * layers:,} tensors, again"
    result.add(Figure.milliseconds(title, samples, "objects"))
    result.add(Figure.milliseconds("the same as a dict", samples, "dict"))
    result.add(Figure.milliseconds("state_dict() of both", samples, "state_dict()"))
    keep(result)


def synthetic(tensors: int, shards: int) -> FlatState:
    """Shards along the first dimension, keyed by tensor and shard."""
    count, rows = tensors * shards, 4096 // shards
    keys = [f"layer.{tensor:04}/{shard:03}".encode() for tensor in range(tensors) for shard in range(shards)]
    lengths = np.array([len(key) for key in keys])
    shard = np.tile(np.arange(shards), tensors)
    zero, full = np.zeros(count, np.int64), np.full(count, 4096)
    dims = np.stack([full, full, shard * rows, zero, np.full(count, rows), full], axis=1)
    chunks = ChunkTable(
        keys=b"".join(keys),
        key_offsets=np.cumsum(lengths) - lengths,
        key_lengths=lengths,
        dtypes=np.full(count, 11, np.uint8),
        ndims=np.full(count, 2, np.uint8),
        dims_at=np.arange(count) * 6,
        dims=np.ascontiguousarray(dims).reshape(-1),
        nbytes=np.full(count, rows * 4096 * 2),
    )
    pointers = np.cumsum(chunks.nbytes).astype(np.uint64)
    devices, items, floating = np.zeros(count, np.uint8), np.full(count, 2, np.uint8), np.ones(count, np.bool_)
    return FlatState(chunks, pointers, devices, {}, items, floating, None, b"{}")
