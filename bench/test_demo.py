"""The demonstration itself, and its parts at toy size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tierload
from bench import report
from bench.gpt import Shape
from bench.hot_versus import loaded, started, trained
from bench.measuring import Figure, Result
from bench.stage import ROOT, environment
from bench.train import Run, bits

TINY = Shape(layers=1, width=16, heads=2, context=8)


def tiny_run(seed: int) -> Run:
    torch.manual_seed(seed)
    return Run(TINY, batch=2, text_bytes=1 << 14)


def test_resumes_bit_for_bit(tmp_path):
    run = tiny_run(seed=0)
    for _ in range(3):
        run.step()
    tierload.save(run.state, tmp_path / "s", step=run.steps)
    expected = [bits(run.step()) for _ in range(3)]
    other = tiny_run(seed=1)
    tierload.load(tmp_path / "s", into=other.state)
    assert other.steps == 3
    assert [bits(other.step()) for _ in range(3)] == expected
    assert other.digest() == run.digest()


def test_report_says_what_held(tmp_path):
    result = Result("r", "Title", "How.", tmp_path)
    result.add(Figure.of("fast", [1.0, 3.0, 2.0], "ms", limit=2.5))
    result.add(Figure.of("slow", [3.0, 3.0, 3.0], "ms", limit=2.5))
    result.write(tmp_path / "results")
    page = tmp_path / "page.md"
    page.write_text(f"before {report.BEGIN} old {report.END} after")
    report.write(page, tmp_path / "results")
    text = page.read_text()
    assert "| fast | 2 ms | 1 to 3 |  | ≤ 2.5 ms | yes |" in text
    assert "| slow | 3 ms | 3 to 3 |  | ≤ 2.5 ms | **no** |" in text
    assert "old" not in text
    assert text.endswith("after")


def test_a_hot_start_computes_what_a_load_does(tmp_path):
    tierload.save(trained(TINY), tmp_path / "s")
    hot, load = (way(tmp_path / "s", TINY) for way in (started, loaded))
    assert hot.output == load.output
    assert 0 < hot.returned < hot.first_layer < hot.first_output <= hot.everything


@pytest.mark.slow
def test_demo(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo", "--dir", str(tmp_path)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert not list(tmp_path.iterdir())
