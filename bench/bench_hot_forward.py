"""Hot starts from a cold disk: when a model's first output is there, and how long it has waited for its weights."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tierload
from bench.gpt import GPT, Shape
from bench.hot_models import EarlyExit, Mixture, in_arrival_order, used_bytes
from bench.measuring import CPU, Figure, Result, Samples, Task, drop_cached, interleave, median, ratios
from bench.versus import torch_save_durably
from tierload.engine import devices

_COLD = (
    "Before each the files were taken out of the page cache (posix_fadvise DONTNEED after an fsync) and free memory "
    "was given back (malloc_trim); the model is the same one each time, in memory that is there, and each hot start "
    "ends before the next thing begins."
)
_FORWARD_HOW = (
    "A transformer in float32, {size:.3g} GB with both moments of AdamW, of which the pass (of one token, nothing "
    "said of the order) needs {share:.3g}; weights as before training, saved with compression {how}. "
    "{cold} *First output*: from the call of `hot_start(path, model, optimizer)` until the model's forward pass "
    "returns. *First layer*: until its first block returns; the time for that block's and the embeddings' {first:.3g}"
    " MB is by the rate of the full load of the same round. `torch.load` is `weights_only=True`, then both "
    "`load_state_dict` and the pass."
)
_PART_HOW = (
    "The pass of one token needs {share:.3g} of the {size:.3g} GB of weights in float32 that the store has (no "
    "optimizer); nothing says beforehand which. {cold} *Full load*: `load(into=)` and then the pass."
)
_STALL_HOW = (
    "The same pass after the same call, from the same cold store, with urgency (the order of modules; who waits is "
    "next; calls raise what comes after them) and in arrival order (as the pages follow one another in the file, by "
    "key, whoever waits). `stalled`: `progress.stalled_seconds` when the first output is there. The batch, {tokens} "
    "tokens, is such that a pass of weights that are there takes about as long as it takes to read them: "
    "{compute:.3g} s. {cold}"
)


class _Subject:
    """A model, and a store of it, with its optimizer or without one."""

    def __init__(self, model: nn.Module, path: Path, compression: str, tokens: int, *, trains: bool = False) -> None:
        self.model, self.path = model.eval(), path
        self.tokens = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(0))
        self.optimizer = _stepped(model) if trains else None
        self.into: dict[str, object] = {"model": model} | ({"optimizer": self.optimizer} if trains else {})
        self.samples: Samples = {}
        self.report = tierload.save(self.into, path, settings=tierload.Settings(compression=compression))
        self.expected = self.forward()
        self.needed = used_bytes(model, self.forward)
        self._begun: list[tierload.HotStart] = []

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        return self.model(self.tokens)

    def hot(self, name: str, *, ordered: bool = False, watched: nn.Module | None = None) -> Task:
        """A hot start and a pass; ``ordered`` knows no urgency. When the output of the module ``watched`` was there,
        and how long the pass was stalled, is kept with the name's samples."""

        def run() -> None:
            start = time.perf_counter()
            handle = (
                watched.register_forward_hook(lambda *_: seen.append(time.perf_counter() - start)) if watched else None
            )
            with in_arrival_order() if ordered else nullcontext():
                self._begun.append(tierload.hot_start(self.path, self.model, self.optimizer))
            output = self.forward()
            stalled.append(max(self._begun[0].progress.stalled_seconds, 1e-6))  # there are ratios of them
            if handle is not None:
                handle.remove()
            assert torch.equal(output, self.expected)

        stalled = self.samples.setdefault(f"{name}, stalled", [])
        seen = self.samples.setdefault(f"{name}, first layer", [])
        return Task(run, before=partial(_forget, self.path), after=self.end)

    def end(self) -> None:
        self._begun.pop().join()

    def full(self, *, forward: bool) -> Task:
        def run() -> None:
            tierload.load(self.path, into=self.into)
            if forward:
                self.forward()

        return Task(run, before=partial(_forget, self.path))


@pytest.mark.parametrize("compression", ["auto", "off"])
def test_first_forward(benchmark, scale, folder, keep, compression):
    subject = _Subject(_gpt(scale, GPT), folder / "store", compression, 1, trains=True)
    model, file = subject.model, folder / "file.pt"
    torch_save_durably({name: one.state_dict() for name, one in subject.into.items()}, file)  # type: ignore[attr-defined]
    first = sum(one.nbytes for part in (model.tokens, model.places, model.blocks[0]) for one in part.parameters())
    tasks = {
        "first output": subject.hot("first output", watched=model.blocks[0]),
        "tierload.load into": subject.full(forward=False),
        "torch.load, and the pass": Task(partial(_with_torch, subject, file), before=partial(_forget, file)),
        "a pass": Task(subject.forward),
    }
    samples = _run(benchmark, tasks, subject, rounds=scale.of(5, 1))
    share = subject.needed / subject.report.raw_bytes
    how = _FORWARD_HOW.format(
        size=subject.report.raw_bytes / 1e9,
        share=share,
        how=f"{compression} ({subject.report.compression})",
        cold=_COLD,
        first=first / 1e6,
    )
    result = Result(
        f"hot-forward-{compression}", f"First output after a hot start, saved with {compression}", how, folder
    )
    result.samples = samples
    _times(result, samples, [*tasks, "first output, first layer", "first output, stalled"])
    loads = samples["tierload.load into"]
    # What the bytes needed take at the rate of the full load in the same round.
    in_time = [seconds * share for seconds in loads]
    result.add(
        Figure.of("first output ÷ its share of the full load", ratios(samples["first output"], in_time), "", limit=1.2)
    )
    result.add(Figure.against(samples, "first output", "torch.load, and the pass", asked=2))
    in_time = [seconds * first / subject.report.raw_bytes for seconds in loads]
    layers = ratios(samples["first output, first layer"], in_time)
    result.add(Figure.of("first layer ÷ its share of the full load", layers, "", limit=1.3))
    device = devices.remembered(folder)
    rate = f"{device.read / 1e9:.3g} GB/s as calibrated" if device is not None else "not calibrated"
    rate_of_load = subject.report.raw_bytes / median(loads) / 1e9
    result.add(Figure("rate of the full load", rate_of_load, "GB/s", note=f"the device: {rate}"))
    keep(result)


@pytest.mark.parametrize("kind", ["mixture", "exit"])
def test_partial_forward(benchmark, scale, folder, keep, kind):
    subject = _Subject(_model(scale, kind), folder / "store", "auto", 1)
    names = {"mixture": "a mixture of experts", "exit": "an early exit"}
    tasks = {"first output": subject.hot("first output"), "full load, and the pass": subject.full(forward=True)}
    samples = _run(benchmark, tasks, subject, rounds=scale.of(7, 1))
    share = subject.needed / subject.report.raw_bytes
    how = _PART_HOW.format(share=share, size=subject.report.raw_bytes / 1e9, cold=_COLD)
    result = Result(f"hot-part-{kind}", f"First output of {names[kind]}", how, folder)
    result.samples = samples
    _times(result, samples, [*tasks, "first output, stalled"])
    result.add(Figure("bytes needed ÷ all", share, ""))
    result.add(Figure.against(samples, "first output", "full load, and the pass"))
    keep(result)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_stall(benchmark, scale, folder, keep, kind):
    subject = _Subject(_model(scale, kind), folder / "store", "auto", 4)
    compute = _match(subject, scale.real)
    tasks = {
        "urgency": subject.hot("urgency"),
        "arrival order": subject.hot("arrival order", ordered=True),
    }
    samples = _run(benchmark, tasks, subject, rounds=scale.of(7, 1))
    how = _STALL_HOW.format(tokens=subject.tokens.numel(), compute=compute, cold=_COLD)
    names = {"dense": "a transformer", "mixture": "a mixture of experts"}
    result = Result(f"hot-stall-{kind}", f"Stall of the first pass of {names[kind]}", how, folder)
    result.samples = samples
    _times(result, samples, [*tasks, *(f"{name}, stalled" for name in tasks)])
    stalls = ratios(samples["urgency, stalled"], samples["arrival order, stalled"])
    result.add(Figure.of("stalled: urgency ÷ arrival order", stalls, "", limit=0.79))
    result.add(Figure.against(samples, "urgency", "arrival order"))
    keep(result)


def _gpt(scale, kind: Callable[..., nn.Module], *more: object) -> nn.Module:
    torch.manual_seed(0)
    real = Shape(layers=5, width=2048, heads=16, context=1024, dropout=0.0)
    return kind(real if scale.real else Shape(layers=2, width=64, heads=2, context=64, dropout=0.0), *more)


def _model(scale, kind: str) -> nn.Module:
    if kind == "dense":
        return _gpt(scale, GPT)
    if kind == "exit":
        return _gpt(scale, EarlyExit, scale.of(2, 1))
    torch.manual_seed(0)
    return Mixture(*((8, 768, 7) if scale.real else (2, 32, 4)))


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Its AdamW, with moments as after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _match(subject: _Subject, real: bool) -> float:
    """Chooses a batch with which a pass takes about as long as a cold load of the weights; its seconds."""
    _forget(subject.path)
    start = time.perf_counter()
    tierload.load(subject.path, into=subject.into)
    load = time.perf_counter() - start
    while True:
        start = time.perf_counter()
        subject.expected = subject.forward()
        seconds = time.perf_counter() - start
        if seconds >= load / 1.5 or not real or subject.tokens.numel() >= 1024:
            return seconds
        subject.tokens = subject.tokens.repeat(1, 2)


def _with_torch(subject: _Subject, file: Path) -> None:
    loaded = torch.load(file, weights_only=True, mmap=False)
    for name, one in subject.into.items():
        one.load_state_dict(loaded[name])  # type: ignore[attr-defined]
    subject.forward()


def _run(benchmark, tasks: Mapping[str, Task], subject: _Subject, rounds: int) -> Samples:
    """The samples of tasks, and those that the subject took in rounds that count."""
    samples = interleave(benchmark, tasks, rounds=rounds)
    taken = len(next(iter(samples.values())))
    return samples | {name: values[-taken:] for name, values in subject.samples.items() if values}


def _forget(path: Path) -> None:
    """Neither the page cache has the files, nor this process memory that is free and touched already."""
    drop_cached(path)
    ctypes.CDLL(None).malloc_trim(0)


def _times(result: Result, samples: Samples, names: list[str]) -> None:
    for name in names:
        if f"{name}{CPU}" in samples:
            result.add(Figure.milliseconds(name, samples, name))
        else:
            result.add(Figure.of(name, [value * 1e3 for value in samples[name]], "ms"))
