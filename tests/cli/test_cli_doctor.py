"""``tierload doctor``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.support import run, run_json
from tierload import _native
from tierload.engine import devices, machine
from tierload.gds import ProbeResult


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_doctor_says_what_is_here_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    found = run_json("doctor", folder)
    assert found["path"] == str(folder)
    assert {"kernel", "io_uring", "direct I/O", "file system", "free space", "locked memory"} <= found["facts"].keys()
    assert all(way["write"] > 0 and way["read"] > 0 for way in found["ways"])
    direct = [way for way in found["ways"] if way["way"] != "page cache"]
    assert (found["io"] == "direct") == (found["facts"]["direct I/O"] == "works") == bool(direct)
    assert found["compression"] in ("off", "fast")
    assert found["save"] > 0
    assert found["load"] > 0
    if not torch.cuda.is_available():
        assert found["facts"]["GPUDirect Storage"] == "no GPU here"
        assert found["gds"] is found["gpu"] is None
    assert list(folder.iterdir()) == []


def test_doctor_of_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    text = run("doctor", tmp_path / "runs" / "gpt")
    assert str(tmp_path) in text
    assert not (tmp_path / "runs").exists()
    assert "a save of weights" in text


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            ProbeResult("compat", "no nvidia-fs", 1.5e3, 1.7e3),
            "ring: no nvidia-fs, kvikio in compatibility mode",
        ),
        (ProbeResult("gds", "", 1.5e15, 1.7e15), "gds: kvikio wrote 1500000.0 of "),
        (ProbeResult(why="kvikio did not answer within 20 s"), "ring: kvikio did not answer within 20 s"),
    ],
    ids=["compat", "gds", "hang"],
)
def test_doctor_says_which_way_tensors_on_a_gpu_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: ProbeResult, line: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(machine, "probe", lambda folder: found)
    monkeypatch.setattr(devices, "measure", lambda folder: _native.calibrate(str(folder), 0.05))
    monkeypatch.setattr(machine, "_try", lambda path: ("direct", "off", 1e9, 1e9))
    text = run("doctor", tmp_path)
    assert f"raw pages of tensors on a GPU: {line}" in text
    assert (f"kvikio and a GPU, {found.path}" in text) == bool(found.mode)
    assert devices.remembered_way(tmp_path) == found


def test_doctor_where_nothing_can_be_written() -> None:
    assert run("doctor", "/proc", code=5) == ""
