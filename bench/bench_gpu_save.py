"""Saves of a training state on an accelerator: what the loop and the device lose by them, when they are durable, and
what others do with the same state in the same run. At toy size all of it is on the CPU."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import tierload
from bench.accelerator import Mark, Peaks, device_for, direct_rates, synchronize
from bench.conftest import Scale
from bench.gpu_peers import SAVES, Pinned, Seconds
from bench.llama import Training, fine_tuning, nbytes_of
from bench.measuring import Figure, Result, Task, median, ratios, take_turns
from tierload import _native

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_STATE = (
    "A training state in the shape of a Llama, 6 GiB in {tensors} tensors on the device: bfloat16 weights, float32 "
    "moments of AdamW; every tensor changes between two saves. Nothing is guarded. "
)
_CALL_HOW = _STATE + (
    "*Idle*: nothing is under way on the device when the call comes; *in flight*: a step is, and another follows at "
    "once. `on the device` is the time between events before and behind the call, of which nothing is left but the "
    "copy while a step is in flight; `added` is that and the next step, less a step alone. `ceiling` is the rate of "
    "writes past the page cache in the same run, times what compression saved. Host memory is what was anonymous or "
    "pinned on the whole machine. The last save in flight was loaded and compared with a copy made at its call."
)
_TRAINING_HOW = _STATE + (
    '{steps} steps with a save every {every}, `on_busy="skip"`, over as many without any; the device\'s end is waited '
    "for, that of the last save is not. In turn."
)
_PEERS_HOW = _STATE + (
    "In turn, in one process, each round in the other order. `call` is what the loop waits, `durable` until everything "
    "is synced. *Pinned* is DCP's `DefaultStager` with pinned memory for the whole state, copying without blocking."
)
_LORA_HOW = (
    "A base of 6 GiB in bfloat16 that never changes, and adapters of rank 16 on its attention with their AdamW, "
    "{changed:.1f} MB of which every element changes. The first save writes everything; then steps, and after each a "
    "save of all. Nothing is guarded."
)
_CALL_LIMITS_MS = {
    "call, idle": 3,
    "call, in flight": 3,
    "waited, in flight": 3,
    "staged, idle": 10,
    "on the device": 5,
    "step alone": None,
    "added": 5,
}
# What peers end with; CheckpointException is no Exception.
_FAILURES = (CheckpointException, RuntimeError, TypeError, AssertionError, OSError)


def bytes_to_host(device: str) -> int | None:
    """What has been moved from the device over PCIe so far, or None where there is none."""
    return _native.accelerator(1).bytes_to_host if device == "cuda" else None


def _training(scale: Scale, device: str) -> Training:
    size = {"batch": 8, "context": 1024} if scale.real else {"batch": 2, "context": 16}
    run = Training.of(scale.of(6 << 30, 1 << 20), device, **size)
    for _ in range(3):
        run.train_step()
    return run


def _idle(run: Training, store: tierload.Store, device: str) -> tuple[Seconds, tierload.SaveReport, int | None]:
    run.train_step()
    synchronize(device)
    before = bytes_to_host(device)
    start = time.perf_counter()
    pending = store.async_save(run.state)
    called = time.perf_counter() - start
    pending.staged()
    staged = time.perf_counter() - start
    report = pending.result()
    crossed = None if before is None else bytes_to_host(device) - before
    return Seconds(called, staged, report.seconds), report, crossed


@dataclass(frozen=True)
class _InFlight:
    """Seconds: of the call and of all that the loop waited; of the device, behind the call and behind the next step."""

    call: float
    waited: float
    on_device: float
    with_step: float


def _in_flight(run: Training, device: str, save: Callable[[], tierload.PendingSave] | None) -> _InFlight:
    run.train_step()
    before, start = Mark(device), time.perf_counter()
    pending = save() if save else None
    called = time.perf_counter() - start
    after = Mark(device)
    run.train_step()
    end = Mark(device)
    waited = pending.result().waited_seconds if pending else 0.0
    return _InFlight(called, waited, before.until(after), before.until(end))


def test_call(benchmark, scale, folder, keep):
    device = device_for(scale)
    run = _training(scale, device)
    count = len(run.named_tensors())
    result = Result("gpu-save-call", "Save on an accelerator: 6 GiB", _CALL_HOW.format(tensors=count), folder)
    ceilings = [direct_rates(folder, scale)[0]]
    samples = result.samples
    with tierload.Store(folder / "store", mode="w") as store:
        with Peaks(device) as peaks:
            first, _, _ = _idle(run, store, device)
        for _ in range(scale.of(4, 1)):
            store.collect(keep=1)
            seconds, report, _ = _idle(run, store, device)
            ceilings.append(direct_rates(folder, scale)[0])
            ceiling = (ceilings[-2] + ceilings[-1]) / 2 * report.raw_bytes / report.written_bytes
            alone = _in_flight(run, device, None)
            found = _in_flight(run, device, lambda: store.async_save(run.state))
            for name, value in {
                "call, idle": seconds.call,
                "staged, idle": seconds.staged,
                "durable": seconds.durable,
                "ceiling ÷ rate": ceiling * seconds.durable / report.raw_bytes,
                "call, in flight": found.call,
                "waited, in flight": found.waited,
                "on the device": found.on_device,
                "step alone": alone.with_step,
                "added": found.with_step - alone.with_step,
            }.items():
                samples.setdefault(name, []).append(value)
        _assert_not_torn(run, store)
    benchmark.pedantic(lambda: None, rounds=1)
    result.add(Figure("first save: call", first.call * 1e3, "ms"))
    result.add(Figure("first save: staged", first.staged * 1e3, "ms", limit=30))
    for name, limit in _CALL_LIMITS_MS.items():
        result.add(Figure.of(name, _ms(samples[name]), "ms", limit=limit))
    rate = report.raw_bytes / 1e9 / median(samples["durable"])
    way = f"{rate:.2f} GB/s, {report.compression}, {report.commit.io}, "
    way += f"{report.written_bytes / report.raw_bytes:.3f} of the bytes stored"
    result.add(Figure.of("durable", samples["durable"], "s", limit=report.raw_bytes / 2.4e9, note=way))
    result.add(Figure.of("ceiling ÷ rate", samples["ceiling ÷ rate"], "", limit=1 / 0.9))
    result.add(Figure.of("O_DIRECT writes", [rate / 1e9 for rate in ceilings], "GB/s"))
    result.add(Figure("host memory, first save", peaks.host / 2**30, "GiB", limit=1))
    result.add(Figure("memory of the device, first save", peaks.device / 2**30, "GiB"))
    keep(result)


def _assert_not_torn(run: Training, store: tierload.Store) -> None:
    """A save between two steps that are in flight is of its call."""
    run.train_step()
    copies = {name: tensor.clone() for name, tensor in run.named_tensors().items()}
    pending = store.async_save(run.state)
    run.train_step()
    pending.result()
    store.load(into=run.state)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in run.named_tensors().items())


def _ms(seconds: list[float]) -> list[float]:
    return [value * 1e3 for value in seconds]


def test_training(benchmark, scale, folder, keep):
    device = device_for(scale)
    steps, every = scale.of(60, 4), scale.of(10, 2)
    run = _training(scale, device)
    how = _TRAINING_HOW.format(tensors=len(run.named_tensors()), steps=steps, every=every)
    result = Result("gpu-save-training", f"Training on an accelerator, a save every {every} steps: 6 GiB", how, folder)
    direct_rates(folder, scale)
    settings = tierload.Settings(on_busy="skip")
    called = 0
    with tierload.Store(folder / "store", mode="w", settings=settings) as store:

        def train(saves: bool) -> None:
            nonlocal called
            for number in range(steps):
                run.train_step()
                if saves and number % every == every - 1:
                    store.async_save(run.state)
                    called += 1
            synchronize(device)

        def finish() -> None:
            store.wait()
            store.collect(keep=1)

        tasks = {"saves": Task(lambda: train(True), after=finish), "none": Task(lambda: train(False))}
        samples = take_turns(tasks, rounds=scale.of(3, 1))
        skipped = store.skipped
    benchmark.pedantic(lambda: None, rounds=1)
    result.samples = samples
    for name, text in (("saves", "with saves"), ("none", "without")):
        result.add(Figure.milliseconds(f"{steps} steps {text}", samples, name))
    result.add(Figure.of("with ÷ without", ratios(samples["saves"], samples["none"]), "", limit=1.01))
    result.add(Figure("calls of saves", called, "", note=f"{skipped} of them skipped"))
    keep(result)


def test_peers(benchmark, scale, folder, keep):
    device = device_for(scale)
    run = _training(scale, device)
    nbytes = nbytes_of(run.plain())
    how = _PEERS_HOW.format(tensors=len(run.named_tensors()))
    result = Result("gpu-save-peers", "Saves of an accelerator's state beside others: 6 GiB", how, folder)
    pinned = Pinned()
    found: dict[str, list[Seconds]] = {}
    failed: dict[str, str] = {}
    ceilings = []
    with tierload.Store(folder / "store", mode="w") as store:
        ways: dict[str, Callable[[Training, Path], Seconds]] = {
            "tierload.async_save": lambda run, _: _idle(run, store, device)[0],
            **SAVES,
            "DCP async_save, pinned": pinned,
        }
        for number in range(scale.of(3, 1)):
            for name in list(ways)[:: -1 if number % 2 else 1]:
                run.train_step()
                synchronize(device)
                path = folder / "peer"
                try:
                    found.setdefault(name, []).append(ways[name](run, path))
                except _FAILURES as error:
                    if name.startswith("tierload"):
                        raise
                    failed[name] = f"round {number}: {type(error).__name__}: {str(error)[:150]}"
                _remove(path)
                store.collect(keep=1)
            ceilings.append(direct_rates(folder, scale)[0] / 1e9)
    pinned.close()
    benchmark.pedantic(lambda: None, rounds=1)
    for name, seconds in found.items():
        note = f"failed: {failed[name]}" if name in failed else ""
        for part in ("call", "staged", "durable"):
            values = [getattr(one, part) for one in seconds]
            result.samples[f"{name}: {part}"] = values
            if values:
                result.add(Figure.of(f"{name}: {part}", _ms(values), "ms", note=note))
        if values:
            result.add(Figure.of(f"{name}: rate until durable", [nbytes / 1e9 / value for value in values], "GB/s"))
    ours = result.samples["tierload.async_save: durable"]
    for name in ways:
        theirs = result.samples.get(f"{name}: durable", [])
        if name != "tierload.async_save" and len(theirs) == len(ours):
            result.add(Figure.of(f"durable, tierload ÷ {name}", ratios(ours, theirs), ""))
    result.add(Figure.of("O_DIRECT writes", ceilings, "GB/s"))
    keep(result)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def test_fine_tuning(benchmark, scale, folder, keep):
    device = device_for(scale)
    run = fine_tuning(scale.of(6 << 30, 1 << 20), device, rank=scale.of(16, 4), context=scale.of(256, 16))
    adapters = [one for one in run.model.parameters() if one.requires_grad]
    changed = sum(one.nbytes for one in adapters) + nbytes_of(run.optimizer.state_dict())
    how = _LORA_HOW.format(changed=changed / 1e6)
    result = Result(
        "gpu-save-lora", "A fine-tuning with LoRA on an accelerator: 6 GiB, of which little changes", how, folder
    )
    direct_rates(folder, scale)
    samples = result.samples = {name: [] for name in ("call", "staged", "durable", "written ÷ changed")}
    moved: list[float] = []
    with tierload.Store(folder / "store", mode="w") as store:
        _idle(run, store, device)
        for _ in range(scale.of(6, 1)):
            seconds, report, crossed = _idle(run, store, device)
            values = (seconds.call, seconds.staged, seconds.durable, report.written_bytes / changed)
            for name, value in zip(samples, values, strict=True):
                samples[name].append(value)
            if crossed is not None:
                moved.append(crossed / changed)
    benchmark.pedantic(lambda: None, rounds=1)
    for name, limit in (("call", 3), ("staged", 10), ("durable", None)):
        result.add(Figure.of(name, _ms(samples[name]), "ms", limit=limit))
    result.add(Figure.of("written ÷ changed", samples["written ÷ changed"], ""))
    if moved:
        result.add(Figure.of("over PCIe ÷ changed", moved, "", limit=1.2))
    keep(result)
