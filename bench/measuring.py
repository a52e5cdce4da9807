"""How things are timed here: in turn, several times, each round in the other order; all that was seen is kept."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.hardware import describe

__all__ = [
    "CPU",
    "Figure",
    "Result",
    "Samples",
    "Task",
    "drop_cached",
    "fsync_folder",
    "interleave",
    "median",
    "ratios",
    "take_turns",
    "tensors_of",
]

Samples = dict[str, list[float]]
CPU = " (CPU)"


@dataclass(frozen=True)
class Task:
    """``run`` is timed; ``before`` and ``after`` are not."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Figure:
    """One line of the tables. ``limit`` is what was asked for, in the same unit: at most that much, or no limit."""

    what: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    note: str = ""
    cpu: float | None = None

    @classmethod
    def of(cls, what: str, samples: Sequence[float], unit: str, **more: Any) -> Figure:
        """The median, with the lowest and the highest."""
        return cls(what, median(samples), unit, min(samples), max(samples), **more)

    @classmethod
    def milliseconds(cls, what: str, samples: Samples, name: str, **more: Any) -> Figure:
        """Of the task ``name``, with the processor's time: on a shared machine the part that is its own."""
        cpu = median(samples[f"{name}{CPU}"]) * 1e3
        return cls.of(what, [value * 1e3 for value in samples[name]], "ms", cpu=cpu, **more)

    @classmethod
    def against(cls, samples: Samples, name: str, rival: str, *, asked: float | None = None) -> Figure:
        """The ratio of two tasks' times; ``asked`` is how many times as fast as the rival the first one has to be."""
        note = "" if asked is None else f"asked: {asked} times as fast"
        limit = None if asked is None else 1 / asked
        return cls.of(f"{name} ÷ {rival}", ratios(samples[name], samples[rival]), "", limit=limit, note=note)


@dataclass
class Result:
    """What one benchmark found; ``write`` keeps it under its name."""

    name: str
    title: str
    how: str
    folder: Path
    figures: list[Figure] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hardware = describe(self.folder)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)

    def write(self, folder: Path) -> Path:
        """Writes ``folder``/``name``.json."""
        content = {
            "name": self.name,
            "title": self.title,
            "how": self.how,
            "command": " ".join(["python", "-m", "pytest", *sys.argv[1:]]),
            "hardware": self.hardware,
            "figures": [asdict(figure) for figure in self.figures],
            "samples": {name: [float(f"{value:.6g}") for value in values] for name, values in self.samples.items()},
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return path


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def ratios(samples: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round, so that what slowed a whole round down does not show as a difference."""
    return [a / b for a, b in zip(samples, others, strict=True)]


class _Turns:
    """Runs tasks in turn; a round that counts is in the other order than the one before it."""

    def __init__(self, tasks: Mapping[str, Task], change: Callable[[], object]) -> None:
        self.tasks = tasks
        self.change = change
        self.samples: Samples = {f"{name}{kind}": [] for name in tasks for kind in ("", CPU)}
        self.subject, *self.rivals = tasks
        self.number = -1

    def timed(self, name: str) -> None:
        start, start_cpu = time.perf_counter(), time.process_time()
        self.tasks[name].run()
        self.samples[name].append(time.perf_counter() - start)
        self.samples[f"{name}{CPU}"].append(time.process_time() - start_cpu)

    def before(self) -> None:
        self.number += 1
        self.change()
        if self.number % 2 == 0:
            self._run_rivals()
        self.tasks[self.subject].before()

    def after(self) -> None:
        self.tasks[self.subject].after()
        if self.number % 2 == 1:
            self._run_rivals()

    def _run_rivals(self) -> None:
        for name in self.rivals:
            self.tasks[name].before()
            self.timed(name)
            self.tasks[name].after()

    def without_first(self) -> Samples:
        return {name: values[1:] for name, values in self.samples.items()}


def take_turns(tasks: Mapping[str, Task], *, rounds: int, change: Callable[[], object] = lambda: None) -> Samples:
    """Seconds of each task, round by round; with ``CPU`` after its name, those of the processor (of all threads).

    ``change`` comes before each round. The first task runs last in one round and first in the next. One more round goes
    before and does not count.
    """
    turns = _Turns(tasks, change)
    for _ in range(rounds + 1):
        turns.before()
        turns.timed(turns.subject)
        turns.after()
    return turns.without_first()


def interleave(
    benchmark: Any, tasks: Mapping[str, Task], *, rounds: int, change: Callable[[], object] = lambda: None
) -> Samples:
    """``take_turns``, where pytest-benchmark times the first task as well.

    With benchmarks disabled there is one round, and it counts.
    """
    turns = _Turns(tasks, change)

    benchmark.pedantic(lambda: turns.timed(turns.subject), setup=turns.before, teardown=turns.after, rounds=rounds + 1)
    if benchmark.disabled:
        turns.after()
        return turns.samples
    return turns.without_first()


def tensors_of(state: object) -> list[torch.Tensor]:
    """Tensors of at least a page in nested dicts and lists: the bulk of what moves."""
    if isinstance(state, torch.Tensor):
        return [state] if state.nbytes >= 4096 else []
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    return []


def drop_cached(path: Path) -> None:
    """Takes a file, or every file of a folder, out of the page cache: posix_fadvise(DONTNEED) after an fsync.

    Other people's pages stay, unlike with /proc/sys/vm/drop_caches.
    """
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
