"""Benchmarks run at full size under `make bench` and once at toy size under plain pytest, so that they cannot rot."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# Read once, when torch is imported: threads that wait must not spin on a machine that others use too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from bench import report
from bench.gpt import Shape
from bench.measuring import Result
from bench.train import Run

RESULTS = Path(__file__).parent / "results"
_written: list[Path] = []


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: toy ones, unless benchmarks are enabled."""

    real: bool

    def of(self, real: int, toy: int) -> int:
        return real if self.real else toy


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    return Scale(real=bool(request.config.getoption("benchmark_enable")))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place on the disk that is measured (TMPDIR decides), emptied afterwards: pytest keeps its own for days."""
    inner = tmp_path / "bench"
    inner.mkdir()
    yield inner
    shutil.rmtree(inner, ignore_errors=True)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierload-bench-") as inner:
        yield Path(inner)


@pytest.fixture
def keep(scale: Scale, tmp_path: Path) -> Callable[[Result], None]:
    """Writes a result: into bench/results when it is a real one."""

    def write(result: Result) -> None:
        path = result.write(RESULTS if scale.real else tmp_path / "results")
        if scale.real:
            _written.append(path)

    return write


@pytest.fixture(scope="session")
def trained(scale: Scale) -> Run:
    """The demonstration's run after some steps: real weights and moments."""
    torch.manual_seed(0)
    run = Run() if scale.real else Run(Shape(layers=2, width=32, heads=2, context=16), batch=2, text_bytes=1 << 16)
    for _ in range(scale.of(40, 2)):
        run.step()
    return run


@pytest.fixture(scope="session")
def large(scale: Scale) -> dict[str, torch.Tensor]:
    """A state of 1 GiB: 64 float32 tensors of normally distributed numbers, as weights are before training."""
    generator = torch.Generator().manual_seed(0)
    items = scale.of(1 << 22, 1 << 15)
    return {f"layer.{n}": torch.empty(items).normal_(0, 0.02, generator=generator) for n in range(scale.of(64, 4))}


@pytest.fixture(scope="session")
def adamw(scale: Scale) -> dict[str, object]:
    """What training with AdamW saves, 1 GiB of float32 in all: weights and both moments, distributed as early in a run.

    Plain dicts, in the form of ``state_dict()``.
    """
    generator = torch.Generator().manual_seed(0)
    count = scale.of(32, 4)
    items = scale.of(1 << 30, 3 << 20) // (12 * count)

    def normal(deviation: float) -> torch.Tensor:
        return torch.empty(items).normal_(0, deviation, generator=generator)

    numbers = range(count)
    state = {
        n: {"step": torch.tensor(100.0), "exp_avg": normal(1e-3), "exp_avg_sq": normal(1e-3).square_()} for n in numbers
    }
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(numbers)}
    weights = {f"layer.{n}.weight": normal(0.02) for n in numbers}
    return {"model": weights, "optimizer": {"state": state, "param_groups": [group]}}


def pytest_sessionfinish() -> None:
    if _written:
        report.write()
