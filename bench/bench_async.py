"""Saves in the background: what the training loop waits, and what it loses beside the copy and the write."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tierload
from bench.gpt import Shape
from bench.loops import Loop, dcp_async_save, free_cores, linear_layers, work
from bench.measuring import CPU, Figure, Result, Task, interleave, median, ratios, take_turns
from bench.train import Run

_HOW = (
    "1 GiB of float32: weights and AdamW moments, every element of which changes between two saves. An iteration is "
    "the call, {seconds} ms of {work}, and the optimizer's step; what is not yet durable then is waited for outside of "
    "it. `wait` is the call and what the hook of the step waits. Peer: `torch.distributed.checkpoint.async_save` as it "
    "is by default, whose call waits for its copy. In turn, in one process, each round in the other order."
)


class _Iterations:
    """Iterations of one loop, with a save of one kind or none; seconds of each part, by name."""

    def __init__(self, loop: Loop, folder: Path, compute: Callable[[], None]) -> None:
        self.loop, self.folder, self.compute = loop, folder, compute
        self.waits: dict[str, list[float]] = {}
        self.number = 0

    def iterate(self, name: str, save: Callable[[], Callable[[], float]] | None) -> None:
        """``save`` gives what tells the wait in seconds when everything is durable."""
        start = time.perf_counter()
        finish = save() if save else None
        call = time.perf_counter() - start
        self.compute()
        self.loop.optimizer.step()
        self.seconds = time.perf_counter() - start
        waited = finish() if finish else 0.0
        self.waits.setdefault(name, []).append(max(waited, call) if finish else 0.0)

    def tierload(self, store: tierload.Store) -> Callable[[], Callable[[], float]]:
        def save() -> Callable[[], float]:
            pending = store.async_save(self.loop.state)
            return lambda: pending.result().waited_seconds

        return save

    def dcp(self) -> Callable[[], float]:
        self.number += 1
        start = time.perf_counter()
        future = dcp_async_save(self.loop.plain(), self.folder / f"dcp-{self.number}")
        waited = time.perf_counter() - start

        def finish() -> float:
            future.result()
            return waited

        return finish


@pytest.mark.parametrize(
    ("name", "seconds", "threads", "guarded", "limit", "growth"),
    [
        ("far", 0.4, 0, True, 1 / 20, None),
        ("far-free-core", 0.4, -1, True, 1 / 20, 0.8),
        ("far-no-core", 0.4, None, True, None, 0.8),
        ("at-once", 0.0, 0, True, 0.6, None),
        ("unguarded", 0.4, 0, False, 0.6, None),
    ],
)
def test_wait(benchmark, scale, folder, keep, name, seconds, threads, guarded, limit, growth):
    """``threads``: 0 waits as for an accelerator, -1 leaves a core free, None leaves none."""
    cores = max(1, free_cores() - 1) if threads == -1 else free_cores() if threads is None else 0
    kind = f"work on {cores} of {free_cores()} cores" if cores else "waiting (as for an accelerator)"
    title = (
        f"Asynchronous save of 1 GiB, {'guarded' if guarded else 'not guarded'}, next step after {seconds * 1e3:.0f} ms"
    )
    result = Result(f"async-{name}", f"{title}, {kind}", _HOW.format(seconds=f"{seconds * 1e3:.0f}", work=kind), folder)
    loop = Loop(scale.of(1 << 30, 6 << 20), tensors=scale.of(32, 4))
    guard = tierload.guard(loop.optimizer, steps_elsewhere=not guarded)
    iterations = _Iterations(
        loop, folder, work(scale.of(1, 0) * seconds, cores) if cores else lambda: time.sleep(seconds)
    )
    with tierload.Store(folder / "store", mode="w") as store:
        store.prepare(loop.state)
        save = iterations.tierload(store)
        samples: dict[str, list[float]] = {key: [] for key in ("none", "tierload", "dcp")}

        def turn(key: str, begin: Callable[[], Callable[[], float]] | None) -> Callable[[], None]:
            def run() -> None:
                iterations.iterate(key, begin)
                samples[key].append(iterations.seconds)

            return run

        tasks = {
            "tierload": Task(turn("tierload", save), after=lambda: store.collect(keep=1)),
            "dcp": Task(turn("dcp", iterations.dcp), after=lambda: _remove(folder)),
            "none": Task(turn("none", None)),
        }
        interleave(benchmark, tasks, rounds=scale.of(7, 1))
    guard.remove()
    drop = 1 if scale.real else 0
    waits = {key: values[drop:] for key, values in iterations.waits.items()}
    seconds_of = {key: values[drop:] for key, values in samples.items()}
    result.samples = {**{f"{key}: wait": values for key, values in waits.items() if key != "none"}, **seconds_of}
    for key in ("tierload", "dcp"):
        result.add(Figure.of(f"{key}: wait", [value * 1e3 for value in waits[key]], "ms"))
    shares = ratios(waits["tierload"], waits["dcp"])
    result.add(Figure.of("wait, tierload ÷ DCP", shares, "", limit=limit))
    grown = {
        key: [a - b for a, b in zip(seconds_of[key], seconds_of["none"], strict=True)] for key in ("tierload", "dcp")
    }
    for key in ("tierload", "dcp"):
        result.add(Figure.of(f"{key}: growth of the iteration", [value * 1e3 for value in grown[key]], "ms"))
    result.add(Figure("growth, tierload ÷ DCP", median(grown["tierload"]) / median(grown["dcp"]), "", limit=growth))
    keep(result)


def _remove(folder: Path) -> None:
    for path in folder.glob("dcp-*"):
        shutil.rmtree(path)


def test_first(benchmark, scale, folder, keep):
    result = Result(
        "async-first",
        "The first asynchronous save of a process, 1 GiB, nothing guarded",
        "What the call waits when the memory of the copy was never touched, when `prepare` touched it beside the loop "
        "before, and in the second save. A new store object each round, so that no memory is there yet.",
        folder,
    )
    loop = Loop(scale.of(1 << 30, 6 << 20), tensors=scale.of(32, 4))
    waits: dict[str, list[float]] = {"first": [], "first, prepared": [], "second": []}

    def round_of(prepared: bool) -> None:
        with tierload.Store(folder / "store", mode="w") as store:
            if prepared:
                store.prepare(loop.state)
                time.sleep(scale.of(3, 0))
            waits["first, prepared" if prepared else "first"].append(
                store.async_save(loop.state).result().waited_seconds
            )
            loop.optimizer.step()
            if prepared:
                waits["second"].append(store.async_save(loop.state).result().waited_seconds)
            store.collect(keep=1)
        loop.optimizer.step()

    def both() -> None:
        round_of(False)
        round_of(True)

    benchmark.pedantic(both, rounds=scale.of(5, 1))
    result.samples = waits
    for key, values in waits.items():
        result.add(Figure.of(f"{key}: wait", [value * 1e3 for value in values], "ms"))
    keep(result)


def test_call(benchmark, scale, folder, keep):
    count = scale.of(900, 9)
    result = Result(
        "async-call",
        "The call's own time: 3,600 tensors that did not change",
        f"A model of {count:,} linear layers of 8 by 8 without bias with its AdamW, guarded: weights, two moments and "
        "a step counter each, 3,600 tensors in all, so small that their copy takes no time. Nothing changes between "
        "saves. `call` is all of async_save, `describe` its part that walks the state and plans pages.",
        folder,
    )
    model, optimizer = linear_layers(count, 8)
    guard = tierload.guard(optimizer)
    state = {"model": model, "optimizer": optimizer, "epoch": 1}
    with tierload.Store(folder / "store", mode="w") as store:
        store.async_save(state).result()
        pending = []
        tasks = {
            "call": Task(lambda: pending.append(store.async_save(state)), after=lambda: pending.pop().result()),
            "describe": Task(lambda: store._draft(state, None, None, (), "", allow_pickle=False, heat=None)),
        }
        samples = interleave(benchmark, tasks, rounds=scale.of(60, 1))
    guard.remove()
    result.samples = samples
    result.add(Figure.milliseconds("call", samples, "call", limit=3.0))
    result.add(Figure.milliseconds("describe", samples, "describe"))
    keep(result)


def test_short_steps(benchmark, scale, folder, keep):
    steps, count = scale.of(400, 5), scale.of(5000, 20)
    result = Result(
        "async-short-steps",
        f"Steps of 5 ms beside a save of {count:,} tensors",
        "One thread: Python and small products of matrices for about 5 ms a step, P99 of so many steps, without a save "
        "and while saves of a plain dict of tensors of 40 KiB (compressed, with their digests) are under way one after "
        "the other. The steps that make the call itself are left out: the call is another figure.",
        folder,
    )
    state = {f"t{n}": torch.randn(scale.of(10_000, 100)) for n in range(count)}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    step = _short_step()
    found: dict[str, list[float]] = {"none": [], "saving": []}
    with tierload.Store(folder / "store", mode="w", settings=tierload.Settings(compression="fast")) as store:
        store.async_save(state).result()

        def run() -> None:
            found["none"].append(_p99([step() for _ in range(steps)]))
            times: list[float] = []
            pending = None
            while len(times) < steps:
                if pending is None or pending.done():
                    for tensor in state.values():
                        tensor.add_(1e-3)
                    pending = store.async_save(state)
                    continue
                times.append(step())
            pending.result()
            store.collect(keep=1)
            found["saving"].append(_p99(times))

        benchmark.pedantic(run, rounds=scale.of(7, 1))
    torch.set_num_threads(before)
    result.samples = found
    for key, values in found.items():
        result.add(Figure.of(f"P99 of a step, {key}", [value * 1e3 for value in values], "ms"))
    result.add(Figure.of("P99, saving ÷ none", ratios(found["saving"], found["none"]), "", limit=1.2))
    keep(result)


def _short_step() -> Callable[[], float]:
    a = torch.randn(96, 96)
    numbers = list(range(2000))

    def once() -> float:
        start = time.perf_counter()
        while time.perf_counter() - start < 0.004:
            sum(numbers)
            torch.mm(a, a)
        for _ in range(5):  # work, not time: what disturbs it shows
            sum(numbers)
            torch.mm(a, a)
        return time.perf_counter() - start

    return once


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


@pytest.mark.parametrize("free", [True, False])
def test_training(benchmark, scale, folder, keep, free):
    steps, every = scale.of(40, 4), scale.of(10, 2)
    threads = max(1, free_cores() - 1) if free else free_cores()
    name = "a core free" if free else "no core free"
    result = Result(
        f"async-training-{'free' if free else 'busy'}",
        f"The demonstration's model, a save every {every} steps, {name}",
        f"{steps} steps of the demonstration's GPT on {threads} of {free_cores()} cores, its optimizer guarded: wall "
        "time with an asynchronous save of everything every so many steps over the time without any; the end of the "
        "last save is not waited for. In turn.",
        folder,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    run = Run() if scale.real else _toy()
    guard = tierload.guard(run.optimizer)
    waits: list[float] = []
    with tierload.Store(folder / "store", mode="w") as store:
        store.prepare(run.state)
        pending: list[tierload.PendingSave] = []

        def train(saves: bool) -> None:
            for number in range(steps):
                run.step()
                if saves and number % every == every - 1:
                    pending.append(store.async_save(run.state))

        def finish() -> None:
            waits.extend(each.result().waited_seconds for each in pending)
            pending.clear()
            store.collect(keep=1)

        train(True)
        finish()
        waits.clear()
        samples = take_turns(
            {"saves": Task(lambda: train(True), after=finish), "none": Task(lambda: train(False))},
            rounds=scale.of(7, 1),
        )
        benchmark.pedantic(lambda: None, rounds=1)
    guard.remove()
    torch.set_num_threads(before)
    result.samples = samples | {"wait": waits}
    result.add(Figure.milliseconds(f"{steps} steps with saves", samples, "saves"))
    result.add(Figure.milliseconds(f"{steps} steps without", samples, "none"))
    limit = 1.03 if free else None
    result.add(Figure.of("with ÷ without", ratios(samples["saves"], samples["none"]), "", limit=limit))
    result.add(Figure.of("processor time, with ÷ without", ratios(samples[f"saves{CPU}"], samples[f"none{CPU}"]), ""))
    result.add(Figure("wait of a save", statistics.median(waits) * 1e3, "ms"))
    keep(result)


def _toy() -> Run:
    return Run(Shape(layers=2, width=32, heads=2, context=16), batch=2, text_bytes=1 << 16)
