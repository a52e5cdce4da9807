"""``tierload doctor``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import run, run_json


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
    assert list(folder.iterdir()) == []


def test_doctor_of_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    text = run("doctor", tmp_path / "runs" / "gpt")
    assert str(tmp_path) in text
    assert not (tmp_path / "runs").exists()
    assert "a save of weights" in text


def test_doctor_where_nothing_can_be_written() -> None:
    assert run("doctor", "/proc", code=5) == ""
