"""``tierload top`` beside a process that saves in the background, and after it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.ending_scripts import Script
from tests.cli.support import ROOT, process, run, run_json
from tests.saves.failing import running

SAVES = """
import tierload
from tests.saves.failing import *
torch.set_num_threads(1)
held = tierload.open({store!r}, mode="w", settings=HELD)
pending = held.async_save(noise(5, 64), step=500)
until_writing(pending)
held.settings = replace(HELD, on_busy="skip")
assert held.async_save(noise(6, 64), step=600).skipped
while not os.path.exists({store!r} + "/LIVE"): pass
say("ready")
sys.stdin.read(1)
pending.cancel()
held.settings = SMALL
held.async_save(noise(7, 64), step=700).result()
held.close()
say("closed")
sys.stdin.read(1)
"""


@pytest.fixture
def writer(store: Path, tmp_path: Path) -> Iterator[Script]:
    """A process that has a save in flight, and one skipped."""
    folder = tmp_path / "script"
    folder.mkdir()
    with running(folder, SAVES.format(store=str(store))) as script:
        script.hears("ready")
        yield script


def goes_on(writer: Script) -> None:
    assert writer.process.stdin is not None
    writer.process.stdin.write(".")
    writer.process.stdin.flush()


def test_beside_a_save(store: Path, writer: Script) -> None:
    while (found := run_json("top", store))["skipped"] == 0:  # until the file says so
        pass
    assert found["alive"] is True
    assert (found["store"], found["pid"], found["skipped"]) == (str(store), writer.process.pid, 1)
    (save,) = found["saves"]
    assert save["step"] == 500
    assert save["seconds"] > 0
    progress = save["progress"]
    assert progress["phase"] == "writing"
    assert progress["total_bytes"] == progress["staged_bytes"] > progress["written_bytes"] > 0
    text = run("top", store, "--once")
    assert re.search(rf"writer +process {writer.process.pid} on ", text)
    assert "ended" not in text
    assert re.search(r"skipped +1 save\b", text)
    assert re.search(r"^ *500 +writing", text, re.MULTILINE)


def test_in_another_process_until_the_store_is_closed(store: Path, writer: Script) -> None:
    command = [sys.executable, "-m", "tierload", "top", str(store)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert re.match(r"step 500: writing, .* copied and .* written of", top.stdout.readline())
        goes_on(writer)
        writer.hears("closed")
        out, err = top.communicate(timeout=100)
        assert out.endswith("the writer has closed the store\n")
        assert (top.returncode, err) == (0, "")
    assert "nothing has been saved" in run("top", store)
    assert run_json("top", store) == {"store": str(store), "alive": False, "pid": None, "saves": []}


def test_after_a_kill(store: Path, writer: Script) -> None:
    """It says that what was in flight is lost, and the store is as it was."""
    writer.process.kill()
    writer.process.wait()
    assert run_json("top", store)["alive"] is False
    for words in (("top", store), ("top", store, "--once")):
        assert "which has ended: what it had in flight was never committed" in run(*words)
    assert [commit["step"] for commit in run_json("log", store)["commits"]] == [400, 300, 200, 100]
    assert run_json("verify", store, "--full")["ok"] is True


def test_a_store_that_was_never_saved_in_the_background(store: Path) -> None:
    assert "nothing has been saved in the background here" in run("top", store)
    assert run_json("top", store)["saves"] == []


def test_no_store(tmp_path: Path) -> None:
    done = process("top", str(tmp_path / "nothing"))
    assert done.returncode != 0
    assert "holds no tierload store" in done.stderr
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 4096, b'{"saves": 3}', b"[" * 4000, b'{"pid": "x"}'])
def test_a_file_that_is_somebody_elses(store: Path, content: bytes) -> None:
    (store / "LIVE").write_bytes(content)
    assert "nothing has been saved" in run("top", store, "--once")


def test_what_a_hostile_writer_says_is_shown_as_text(store: Path) -> None:
    saves = [{"step": 1, "seconds": 1, "phase": "\x1b[2J", "staged_bytes": 1, "written_bytes": 1, "total_bytes": 1}]
    content = {"host": "\x1b]0;x\x07", "pid": 1, "time": 0, "skipped": 0, "saves": saves}
    (store / "LIVE").write_text(json.dumps(content))
    assert "\x1b" not in run("top", store, "--once")
