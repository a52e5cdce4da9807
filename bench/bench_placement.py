"""Placement by heat: what it costs a save and the storage, and how much sooner the hot pages alone are loaded."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

import tierload
from bench.measuring import Figure, Result, Task, drop_cached, interleave, take_turns
from tierload.engine import devices
from tierload.heat import HeatMeter
from tierload.layout import place_pages, plan_pages
from tierload.state import flatten

_HOW = (
    "A stack of linear layers behind an embedding, float32, with AdamW's moments, after some metered steps. Saved into "
    'a new store each time: without a meter; with it, `compression="fast"` (the order alone) and `"auto"` (hot pages '
    "raw where the device gives them sooner so). *Hot pages* are the same in all stores, the hottest quarter of the "
    "bytes; each load reads them alone, verified, into memory that was there before, after the files were taken out of "
    "the page cache (posix_fadvise DONTNEED after an fsync)."
)
_PAGE, _PACK = 1 << 20, 1 << 15


class _Stack(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16 * width, width)
        # Keys are sorted as texts: layer.10 comes before layer.2, in segments too where no heat is known.
        self.layer = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.words(words)
        for layer in self.layer:
            hidden = hidden + torch.nn.functional.gelu(layer(hidden))
        return hidden


class _Subject:
    """One way to save, in new stores, and to load the hot pages of the last one."""

    def __init__(self, path: Path, state: object, compression: str, meter: HeatMeter | None) -> None:
        self.path, self.state, self.meter = path, state, meter
        self.settings = tierload.Settings(compression=compression)  # type: ignore[arg-type]

    def empty(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.store = tierload.open(self.path, mode="w", settings=self.settings)

    def save(self) -> None:
        self.report = self.store.save(self.state, heat=self.meter)

    def load(self, store: tierload.Store, pages: np.ndarray, lengths: np.ndarray, room: np.ndarray) -> Task:
        """Loads these pages of the last store."""
        read = partial(
            store._native.manifest(store.head().txid).read,
            pages=pages,
            offsets=np.zeros(len(pages), np.uint32),
            pointers=(room.ctypes.data + np.cumsum(lengths) - lengths).astype(np.uint64),
            lengths=lengths,
            threads=store._threads,
            touched=np.zeros(len(pages), np.uint8),
            progress=None,
        )
        return Task(read, before=partial(drop_cached, self.path))


def test_placement(benchmark, scale, folder, keep):
    state, meter = _metered(scale.of(1024, 128), scale.of(16, 11))
    if scale.real:
        devices.calibrate(folder)  # so that "auto" knows what loads faster
    result = Result("placement", "Placement by heat: saves, storage, and loads of what is hot", _HOW, folder)
    subjects = {
        "without a meter": _Subject(folder / "without", state, "auto", None),
        "in order": _Subject(folder / "order", state, "fast", meter),
        "by heat": _Subject(folder / "heat", state, "auto", meter),
    }
    tasks = {f"save {name}": Task(one.save, one.empty, lambda o=one: o.store.close()) for name, one in subjects.items()}
    samples = interleave(benchmark, tasks, rounds=scale.of(7, 1))
    pages, lengths = _hot(subjects["by heat"])
    room = np.ones(int(lengths.sum()), np.uint8)
    with ExitStack() as stores:
        loads = {
            f"load what is hot, saved {name}": one.load(
                stores.enter_context(tierload.open(one.path)), pages, lengths, room
            )
            for name, one in subjects.items()
        }
        samples |= take_turns(loads, rounds=scale.of(11, 1))
    result.samples = samples
    for what in ("save", "load what is hot, saved"):
        for name in subjects:
            result.add(Figure.milliseconds(f"{what} {name}", samples, f"{what} {name}"))
        for name in ("in order", "by heat"):
            result.add(Figure.against(samples, f"{what} {name}", f"{what} without a meter"))
    plain = subjects["without a meter"].report
    for name in ("in order", "by heat"):
        written = subjects[name].report.written_bytes
        note = f"{written / 1e6:,.1f} MB, {subjects[name].report.compression}"
        result.add(Figure(f"bytes stored {name} ÷ without", written / plain.written_bytes, "", note=note))
    result.add(Figure("hot bytes ÷ all", lengths.sum().item() / plain.raw_bytes, "", limit=0.25))
    keep(result)


def _metered(width: int, layers: int) -> tuple[dict[str, object], HeatMeter]:
    torch.manual_seed(0)
    model = _Stack(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = HeatMeter(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(0, width, (4, 16))).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}, meter


def _hot(subject: _Subject) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and raw bytes of the hot pages, in the order of numbers."""
    plan = plan_pages(flatten(subject.state), _PAGE, _PACK)
    with tierload.open(subject.path) as store:
        placement = place_pages(plan, store.heat(), 0)
    ends = np.cumsum(plan.parts_of_page, dtype=np.int64)
    sizes = np.add.reduceat(plan.lengths, ends - plan.parts_of_page)
    pages = np.sort(placement.order[: placement.hot])
    return pages, sizes[pages]
