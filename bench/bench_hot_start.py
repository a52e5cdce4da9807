"""What a hot start costs before it hands the model over: its four stages, and the first one of a large model."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tierload
from bench.measuring import CPU, Figure, Result, Task, drop_cached, interleave, median
from tierload.engine.pinned import pinned

_REFERENCE_US = {"open": 18, "cold": 32, "hot": 7, "bind": 12}
_STAGES_HOW = (
    "`tierload.hot_start(path, model)` of five linear layers (ten tensors, 83 kB), in the page cache of the disk, in a "
    "process that has made a hot start before; the stages as `HotStart.stages` has them, and the whole call. Beside it "
    "the figures of another system, whose stages are compiled and map a file without looking at what is in it: here "
    "`open` reads both journals, has them flushed, and verifies the digests of the manifest; `cold` compares the state "
    "document with the model, name by name, in Python, and starts the workers; `hot` locks what is hot; `bind` puts a "
    "gate on each tensor and a hook on each module."
)
_OPEN_HOW = (
    "The first stage for a state as that of a Llama of 6.7e9 parameters: weights in bfloat16, master weights and both "
    "moments in float32, {tensors:,} tensors, {size:.3g} GB in {pages:,} pages, all of zeros, so that the disk has one "
    "page and the manifest ({manifest:.3g} MB) all rows. Opened and verified as a hot start does: the journal is "
    "replayed and flushed, the digests of the manifest are compared and each row is checked. `flushes "
    "alone`: the flushes that this needs, by themselves. Cold: the store's files were taken out of the page cache "
    "(posix_fadvise DONTNEED after an fsync)."
)


def test_stages(benchmark, scale, folder, keep):
    result = Result("hot-stages", "The stages of a hot start of ten tensors", _STAGES_HOW, folder)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    tierload.save({"model": model}, folder / "store")
    begun: list[tierload.HotStart] = []
    stages: dict[str, list[float]] = {name: [] for name in _REFERENCE_US}

    def joined() -> None:
        for stage in begun[0].stages:
            stages[stage.name].append(stage.seconds)
        begun.pop().join()

    task = Task(lambda: begun.append(tierload.hot_start(folder / "store", model)), after=joined)
    result.samples = interleave(benchmark, {"hot start": task}, rounds=scale.of(300, 1))
    rounds = len(result.samples["hot start"])
    stages = {name: values[-rounds:] for name, values in stages.items()}
    result.samples |= stages
    for name, values in stages.items():
        note = f"the other system: {_REFERENCE_US[name]} µs"
        result.add(Figure.of(name, [value * 1e6 for value in values], "µs", note=note))
    together = [sum(values) * 1e3 for values in zip(*stages.values(), strict=True)]
    note = f"the other system: {sum(_REFERENCE_US.values())} µs"
    result.add(Figure.of("the four stages", together, "ms", limit=1, note=note))
    result.add(Figure.milliseconds("the whole call", result.samples, "hot start"))
    keep(result)


def test_open_large(benchmark, scale, folder, memory, keep):
    shapes = _llama(*((32, 4096, 11008, 32000) if scale.real else (1, 256, 688, 1000)))
    report = tierload.save(_zeros(shapes), folder / "store", settings=tierload.Settings(compression="off"))
    shutil.copytree(folder / "store", memory / "store")
    how = _OPEN_HOW.format(
        tensors=4 * len(shapes),
        size=report.raw_bytes / 1e9,
        pages=report.pages,
        manifest=max(file.stat().st_size for file in (folder / "store" / "man").iterdir()) / 1e6,
    )
    result = Result("hot-open", "The first stage of a hot start: 6.7e9 parameters", how, folder)
    opened: list[object] = []
    tasks = {
        "open, warm": Task(_opening(folder / "store", opened), after=opened.clear),
        "open, cold": Task(
            _opening(folder / "store", opened), partial(drop_cached, folder / "store"), after=opened.clear
        ),
        "open, warm, in tmpfs": Task(_opening(memory / "store", opened), after=opened.clear),
        "flushes alone": Task(partial(_flush, folder / "store" / "wal")),
    }
    result.samples = interleave(benchmark, tasks, rounds=scale.of(101, 1))
    for name in tasks:
        limit = 1 if name in ("open, warm", "open, warm, in tmpfs") else None
        result.add(Figure.milliseconds(name, result.samples, name, limit=limit))
    used = median(result.samples[f"open, warm{CPU}"]) / (report.raw_bytes / 1e12)
    result.add(Figure("CPU time of an open for each TB of state", used * 1e3, "ms"))
    keep(result)


def _llama(layers: int, width: int, inner: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shapes of such a model's tensors."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width), "norm": (width,)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.attention.{name}": (width, width) for name in "qkvo"}
        shapes |= {f"layers.{layer}.mlp.{name}": (inner, width) for name in ("gate", "up")}
        shapes[f"layers.{layer}.mlp.down"] = (width, inner)
        shapes |= {f"layers.{layer}.norm_{number}": (width,) for number in (1, 2)}
    return shapes | {"head": (vocabulary, width)}


def _zeros(shapes: dict[str, tuple[int, ...]]) -> dict[str, object]:
    """Its training state. The memory is never written to, so that there is none: torch would clear it."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)

    names = ("exp_avg", "exp_avg_sq", "master")
    states = {
        number: {name: zeros(shape, torch.float32) for name in names} for number, shape in enumerate(shapes.values())
    }
    return {"model": {name: zeros(shape, torch.bfloat16) for name, shape in shapes.items()}, "optimizer": states}


def _opening(path: Path, opened: list[object]) -> Callable[[], None]:
    def run() -> None:
        with tierload.open(path) as store:
            opened.append(pinned(store._source(None, None, None, 0, 1)))

    return run


def _flush(folder: Path) -> None:
    """Both copies of each journal, and their names."""
    for path in (*sorted(folder.iterdir()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            (os.fsync if path is folder else os.fdatasync)(descriptor)
        finally:
            os.close(descriptor)
