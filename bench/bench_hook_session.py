"""The plain loop: what saving costs by ``tierload.Session``, and by ``torch.save`` every so many steps by hand."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tierload
from bench.loops import Loop, work
from bench.measuring import Figure, Result, Task, interleave
from bench.versus import bytes_on_disk, torch_save_durably

KEEP = 2


class _Ways:
    """The same loop of so many steps, in several ways. Of each run: seconds of the loop, and of each save of it what it
    waited and when it was durable (which is unknown for a file that nobody has synced)."""

    def __init__(self, loop: Loop, folder: Path, compute: Callable[[], None], *, steps: int, every: int) -> None:
        self.loop, self.folder, self.compute, self.steps, self.every = loop, folder, compute, steps, every
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer, factor=1.0)
        self.seconds: dict[str, list[float]] = {}
        self.waits: dict[str, list[float]] = {}
        self.durable: dict[str, list[float]] = {}
        self.disk: dict[str, tuple[int, int]] = {}  # bytes and files that a run leaves

    def task(self, name: str, run: Callable[[str], float]) -> Task:
        def timed() -> None:
            self.seconds.setdefault(name, []).append(run(name))

        def look() -> None:
            files = [path for path in (self.folder / name).rglob("*") if path.is_file()]
            self.disk[name] = bytes_on_disk(self.folder / name) if files else 0, len(files)
            shutil.rmtree(self.folder / name, ignore_errors=True)

        return Task(timed, after=look)

    def step(self) -> None:
        self.compute()
        self.loop.optimizer.step()
        self.scheduler.step()

    def without(self, name: str) -> float:
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        return time.perf_counter() - start

    def session(self, name: str) -> float:
        parts = {"model": self.loop.model, "optimizer": self.loop.optimizer, "scheduler": self.scheduler}
        handles: list[tierload.PendingSave] = []
        with tierload.Session(self.folder / name, every=self.every, keep=KEEP, **parts) as run:
            store = run._store
            assert store is not None
            begin = store.async_save
            store.async_save = lambda *a, **k: handles.append(begin(*a, **k)) or handles[-1]  # type: ignore[method-assign, func-returns-value]
            start = time.perf_counter()
            for step in run.steps(self.steps + 1):  # the last one, which is waited for, is not timed
                if step > self.steps:
                    seconds = time.perf_counter() - start
                self.step()
        reports = [handle.result() for handle in handles]
        self.waits.setdefault(name, []).extend(report.waited_seconds for report in reports)
        self.durable.setdefault(name, []).extend(report.seconds for report in reports)
        return seconds

    def by_hand(self, name: str, save: Callable[[object, Path], None], *, durable: bool) -> Callable[[str], float]:
        def run(name: str) -> float:
            (self.folder / name).mkdir()
            start = time.perf_counter()
            for step in range(1, self.steps + 1):
                self.step()
                if step % self.every == 0:
                    begin = time.perf_counter()
                    save(self._plain(step), self.folder / name / f"step-{step}.pt")
                    (self.folder / name / f"step-{step - KEEP * self.every}.pt").unlink(missing_ok=True)
                    waited = time.perf_counter() - begin
                    self.waits.setdefault(name, []).append(waited)
                    if durable:
                        self.durable.setdefault(name, []).append(waited)
            return time.perf_counter() - start

        return run

    def _plain(self, step: int) -> dict[str, object]:
        return self.loop.plain() | {
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }


def test_plain_loop(benchmark, scale, folder, keep):
    nbytes, steps, every = scale.of(256 << 20, 3 << 20), scale.of(40, 4), scale.of(10, 2)
    result = Result(
        "hook-session",
        f"A plain loop that saves {nbytes >> 20} MiB every {every} steps",
        f"{steps} steps of 100 ms without work on the processor (as for an accelerator) and AdamW's; weights and "
        "moments in float32, every element of which changes between two saves. `wait` is what one save holds the loop "
        "up; `growth` is the loop's time beyond that of the loop without saving, per save. By hand: `torch.save` of "
        f"model, optimizer, scheduler and random state, plain and synced; {KEEP} are kept in all ways. In turn, in one "
        "process.",
        folder,
    )
    loop = Loop(nbytes, tensors=scale.of(32, 4))
    ways = _Ways(loop, folder, work(scale.of(1, 0) * 0.1, 0), steps=steps, every=every)
    tasks = {
        "session": ways.task("session", ways.session),
        "torch.save": ways.task("torch.save", ways.by_hand("torch.save", _torch_save, durable=False)),
        "torch.save, synced": ways.task(
            "torch.save, synced", ways.by_hand("torch.save, synced", torch_save_durably, durable=True)
        ),
        "none": ways.task("none", ways.without),
    }
    interleave(benchmark, tasks, rounds=scale.of(5, 1))
    drop = 1 if scale.real else 0
    saves = steps // every
    result.samples = {name: seconds[drop:] for name, seconds in ways.seconds.items()}
    for name in (name for name in tasks if name != "none"):
        waits = ways.waits[name][drop * saves :]
        result.samples[f"{name}: wait"] = waits
        result.add(Figure.of(f"{name}: wait", [value * 1e3 for value in waits], "ms"))
        grown = [(a - b) / saves * 1e3 for a, b in zip(result.samples[name], result.samples["none"], strict=True)]
        result.add(Figure.of(f"{name}: growth", grown, "ms"))
        if name in ways.durable:
            durable = [value * 1e3 for value in ways.durable[name][drop * saves :]]
            result.add(Figure.of(f"{name}: durable", durable, "ms"))
        size, files = ways.disk[name]
        result.add(Figure(f"{name}: on disk", size / (1 << 20), "MiB", note=f"{files} files"))
    keep(result)


def _torch_save(state: object, path: Path) -> None:
    torch.save(state, path)
