"""Commands as processes: exit codes, pipes, terminals, signals, and another process that holds the store."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.support import COMMAND, ROOT, contents, flip, invoke, on_a_terminal, process, run
from tierload import __version__
from tierload.rescue.digests import crc32c

_HOLD = "import sys; from tierload.engine import Store; s = Store(sys.argv[1], mode='w'); print(flush=True); input()"


@pytest.fixture
def holder(store: Path) -> Iterator[int]:
    """The pid of another process that holds the store."""
    command = [sys.executable, "-c", _HOLD, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        yield other.pid
        other.communicate(b"\n")


def test_version_and_help() -> None:
    assert process("--version").stdout == f"tierload {__version__}\n"
    shown = process("--help")
    assert shown.returncode == 0
    assert "Exit codes:" in shown.stdout
    assert all(f"\n  {name} " in shown.stdout for name in ("log", "show", "diff", "verify", "rollback", "tag", "gc"))
    assert process().returncode == 2


def test_help_needs_neither_torch_nor_numpy_nor_rich() -> None:
    code = "import sys, tierload.cli; sys.exit(bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_exit_codes_and_errors_on_one_line(store: Path, tmp_path: Path) -> None:
    for words, code in [
        (["log", tmp_path / "nope"], 3),
        (["rollback", tmp_path / "nope", "--steps", "1"], 3),
        (["show", store, "12345"], 3),
        (["log", "x" * 500], 5),
        (["show", store, "step:x"], 2),
    ]:
        done = invoke(*words)
        assert (done.exit_code, done.stdout) == (code, ""), words
        assert done.stderr.startswith("tierload: ")
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "nope").exists()
    assert process("frobnicate", store).returncode == 2


def test_a_store_of_a_newer_release(store: Path) -> None:
    slots = bytearray((store / "SUPER").read_bytes())
    for at in (0, 4096):
        slots[at + 24 : at + 32] = struct.pack("<Q", 1 << 60)  # an incompatible feature that nobody knows
        slots[at + 4092 : at + 4096] = struct.pack("<I", crc32c(bytes(slots[at : at + 4092])))
    (store / "SUPER").write_bytes(slots)
    for words in (["log"], ["gc"], ["verify"]):
        done = invoke(*words, store)
        assert done.exit_code == 6, done.output
        assert done.stderr.count("\n") == 1


def test_beside_a_live_writer(store: Path, holder: int) -> None:
    before = contents(store)
    for words in (["rollback", store, "--to", "100", "--yes"], ["tag", store, "x"], ["gc", store, "--keep", "1"]):
        done = process(*words) if words[0] == "rollback" else invoke(*words)
        code = done.returncode if isinstance(done, subprocess.CompletedProcess) else done.exit_code
        assert code == 4
        for part in (f"process {holder}", "since 20", os.uname().nodename, "wait until it ends, or stop it"):
            assert part in done.stderr
        assert done.stderr.count("\n") == 1
    for words in (
        ["log", store],
        ["show", store],
        ["diff", store, "100", "200"],
        ["verify", store, "--full"],
        ["tag", store],
        ["rollback", store, "--to", "100", "--dry-run"],
        ["gc", store, "--keep", "1", "--dry-run"],
    ):
        run(*words)
    assert contents(store) == before


def test_a_pipe_gets_plain_and_whole_lines(store: Path) -> None:
    long = "größe" * 60
    run("tag", store, long, 200)
    done = process("log", store, FORCE_COLOR="1", COLUMNS="40", PYTHONIOENCODING="utf-8")
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 5
    assert long in done.stdout
    assert "\x1b" not in process("--help", FORCE_COLOR="1").stdout


def test_damage_in_a_pipe_that_cannot_show_every_character(store: Path) -> None:
    flip(sorted((store / "seg").iterdir())[-1], 8192)
    odd = store.rename(store.with_name("größe"))
    done = process("verify", odd, FORCE_COLOR="1", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "DAMAGED commit" in done.stdout
    assert "gr\\xf6\\xdfe" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_a_terminal_gets_colours_unless_told_otherwise(store: Path) -> None:
    run("rollback", store, "--to", "100", "--yes")
    assert "\x1b[2m" in on_a_terminal(*COMMAND, "log", store, "--all", NO_COLOR="")  # superseded ones are dimmed
    plain = on_a_terminal(*COMMAND, "verify", store, NO_COLOR="1")
    assert "no damage" in plain
    assert "\x1b[3" not in plain


def test_a_closed_pipe_and_a_full_disk(store: Path) -> None:
    command = f"'{sys.executable}' -m tierload log '{store}'"
    script = f"{command} | true; echo ${{PIPESTATUS[0]}}; {command} > /dev/full; echo $?"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["141", "5"]
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_ctrl_c(store: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-m", "tierload", "rollback", str(store), "--to", "100"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    while not other.stdout.readline().startswith("keys"):
        pass
    time.sleep(1)  # it asks now
    other.send_signal(signal.SIGINT)
    _, err = other.communicate(timeout=60)
    assert other.returncode == 130
    assert "Traceback" not in err
    assert "(step 400)" in run("log", store) or "head" in run("log", store).splitlines()[1]
