"""The examples of docs/, as a person runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hooks.runs import ROOT, train


@pytest.mark.parametrize("name", ["transformers_trainer", "transformers_lora"])
def test_runs(tmp_path: Path, name: str) -> None:
    assert (ROOT / "docs" / "examples" / f"{name}.py").exists()
    output = train(f"docs.examples.{name}", tmp_path / "store").output
    told = re.findall(r"^step (\d+): (\d+)", output, re.MULTILINE)
    assert len(told) >= 3, output
    if name == "transformers_lora":
        assert all(int(written) < 100_000 for _, written in told), output  # the first, with the base, was collected
