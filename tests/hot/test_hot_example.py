"""docs/examples/hot_start.py does what it says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import tierload
from tests.hooks.runs import ROOT


def test_the_example(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    tierload.save({"model": model}, store)
    monkeypatch.setattr(sys, "argv", ["hot_start.py", str(store)])
    runpy.run_path(str(ROOT / "docs/examples/hot_start.py"))
    *stages, output, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in stages] == ["open", "cold", "hot", "bind"]
    assert output == f"the output: {model(torch.ones(1, 256)).sum().item():.6f}"
    assert re.fullmatch(r"16 tensors, of which uses waited \d+\.\d ms", last)
