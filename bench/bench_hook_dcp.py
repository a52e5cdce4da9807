"""torch.distributed.checkpoint with tierload's storage and with its own, in turn, in one process that is alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierload
from bench.loops import Loop
from bench.measuring import Figure, Result, Task, drop_cached, interleave, median
from bench.versus import bytes_on_disk
from tierload.hooks.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_HOW = (
    "1 GiB of float32: weights and AdamW moments, every element of which changes between two saves. `stock` is "
    "FileSystemWriter and FileSystemReader as they are by default (files are synced, folders are not), each save into "
    "a folder of its own. In turn, each round in the other order. "
)
_MANY = "10,000 tensors of 100 elements each."


class _Both:
    """A state, and where both keep it; after each save what came before is removed."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.number = 0

    def writers(self) -> dict[str, Callable[[], Any]]:
        def stock() -> dcp.FileSystemWriter:
            self.number += 1
            return dcp.FileSystemWriter(self.folder / f"stock-{self.number}")

        return {"tierload": lambda: Writer(self.folder / "store"), "stock": stock}

    def tidy(self) -> None:
        for path in self.folder.glob("stock-*"):
            if path.name != f"stock-{self.number}":
                shutil.rmtree(path)
        if (self.folder / "store").exists():
            with tierload.Store(self.folder / "store", mode="w") as store:
                store.collect(keep=1)

    def paths(self) -> dict[str, Path]:
        return {"tierload": self.folder / "store", "stock": self.folder / f"stock-{self.number}"}

    def readers(self) -> dict[str, Callable[[], Any]]:
        return {
            "tierload": lambda: Reader(self.paths()["tierload"]),
            "stock": lambda: dcp.FileSystemReader(self.paths()["stock"]),
        }

    def change(self) -> None:
        for tensor in _tensors(self.state):
            tensor.mul_(1.0001)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in _tensors(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


def _on_disk(path: Path) -> str:
    files = sum(each.is_file() for each in path.rglob("*"))
    return f"{bytes_on_disk(path) / 1e6:.1f} MB in {files} files"


def _state(scale: Any, many: bool) -> dict[str, Any]:
    if many:
        return {f"{number:05}": torch.randn(100) for number in range(scale.of(10_000, 50))}
    return Loop(scale.of(1 << 30, 6 << 20), tensors=scale.of(32, 4)).plain()


@pytest.mark.parametrize("many", [False, True], ids=["large", "many"])
def test_save(benchmark, scale, folder, keep, many):
    name = "hook-dcp-save-many" if many else "hook-dcp-save"
    result = Result(name, "dcp.save: tierload's Writer and torch's own", _MANY if many else _HOW, folder)
    both = _Both(_state(scale, many), folder)
    tasks = {
        kind: Task(lambda make=make: dcp.save(both.state, storage_writer=make()), after=both.tidy)
        for kind, make in both.writers().items()
    }
    samples = result.samples = interleave(benchmark, tasks, rounds=scale.of(5, 1), change=both.change)
    for kind, path in both.paths().items():
        result.add(Figure.milliseconds(f"{kind}: until durable", samples, kind, note=_on_disk(path)))
    result.add(Figure.against(samples, "tierload", "stock"))
    keep(result)


def test_async_save(benchmark, scale, folder, keep):
    how = _HOW + "`wait` is the call; the loop then waits for what is durable, 0.2 s later at the earliest."
    result = Result("hook-dcp-async", "dcp.async_save: tierload's Writer and torch's own", how, folder)
    both = _Both(_state(scale, many=False), folder)
    waits: dict[str, list[float]] = {}

    def saving(kind: str, make: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            start = time.perf_counter()
            future: Any = dcp.async_save(both.state, storage_writer=make())
            waits.setdefault(kind, []).append(time.perf_counter() - start)
            time.sleep(scale.of(1, 0) * 0.2)
            future.result()

        return run

    tasks = {kind: Task(saving(kind, make), after=both.tidy) for kind, make in both.writers().items()}
    samples = result.samples = interleave(benchmark, tasks, rounds=scale.of(5, 1), change=both.change)
    drop = 1 if scale.real else 0
    for kind in tasks:
        result.add(Figure.of(f"{kind}: wait", [value * 1e3 for value in waits[kind][drop:]], "ms"))
        result.add(Figure.milliseconds(f"{kind}: until durable", samples, kind))
    result.add(Figure("wait, tierload ÷ stock", median(waits["tierload"][drop:]) / median(waits["stock"][drop:]), ""))
    result.add(Figure.against(samples, "tierload", "stock"))
    keep(result)


@pytest.mark.parametrize("many", [False, True], ids=["large", "many"])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_load(benchmark, scale, folder, keep, many, cold):
    name = f"hook-dcp-load{'-many' if many else ''}-{'cold' if cold else 'warm'}"
    how = (_MANY if many else _HOW) + (
        " The files are not in the page cache." if cold else " They are in the page cache."
    )
    result = Result(name, "dcp.load: tierload's Reader and torch's own", how, folder)
    both = _Both(_state(scale, many), folder)
    for make in both.writers().values():
        dcp.save(both.state, storage_writer=make())
    drop = (lambda path: lambda: drop_cached(path)) if cold else (lambda path: lambda: None)
    tasks = {
        kind: Task(lambda make=make: dcp.load(both.state, storage_reader=make()), before=drop(both.paths()[kind]))
        for kind, make in both.readers().items()
    }
    samples = result.samples = interleave(benchmark, tasks, rounds=scale.of(5, 1))
    for kind in tasks:
        result.add(Figure.milliseconds(kind, samples, kind))
    result.add(Figure.against(samples, "tierload", "stock"))
    keep(result)
