"""docs/examples/heat_resnet.py does what its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hooks.runs import ROOT


def test_the_example_prints_what_is_hot_of_each_layer(tmp_path: Path) -> None:
    example = ROOT / "docs/examples/heat_resnet.py"
    command = [sys.executable, "-W", "ignore", example, tmp_path / "run", "--steps", "3", "--width", "2"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].split("  ")[0] == "layer"
    rows = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in lines[3:]}
    assert list(rows) == "conv1 layer1.0.conv1 layer2.3.conv2 layer3.5.conv2 layer4.2.conv2 fc.weight".split()
    for gradient, radius, locality in rows.values():
        assert gradient > 0
        assert radius > 0
        assert 0 < locality <= 1
    assert rows["conv1"][2] > rows["fc.weight"][2], "a step uses it first"
