"""What the tests of the commands share: a small store, running commands in this process and in another one."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

from tierload import Settings
from tierload.cli import app
from tierload.engine import Store

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "tierload")
_SMALL = Settings(compression="fast", page_bytes=4096, pack_below_bytes=1024, max_segment_size_mb=1, threads=1)
_METRICS = {
    100: {"loss": 2.5},
    200: {"loss": float("inf")},
    300: {"loss": 1.25, "note [b]": "ok"},
    400: {"loss": float("nan")},
}


def make_store(path: Path) -> None:
    """Steps 100 to 400, a tag, a note, and a learning rate that is recorded after each commit."""
    with Store(path, mode="w", settings=_SMALL) as store:
        for step, metrics in _METRICS.items():
            state = {
                "w": torch.full((3000,), step, dtype=torch.float32) + torch.arange(3000) / 7,
                "frozen": torch.arange(4000),
                "small": torch.tensor(step),
                "step": step,
            }
            store.save(state, step=step, metrics=metrics, note="the third" if step == 300 else "")
            store.record("/lr", 1 / step, step=step)
        store.tag("best", 300)


def invoke(*words: object, answer: str | None = None) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words], input=answer)


def run(*words: object, code: int = 0, answer: str | None = None) -> str:
    """Stdout of a command that must exit with ``code``."""
    done = invoke(*words, answer=answer)
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    return done.stdout


def run_json(*words: object, code: int = 0) -> Any:
    """The document of a command with ``--json``, as strict JSON."""
    return json.loads(run(*words, "--json", code=code), parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def process(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as people do."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a store."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def flip(file: Path, offset: int) -> None:
    """Damages one byte."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 0xFF
    file.write_bytes(data)


def ids(path: Path) -> dict[int | None, str]:
    """Step → id of the commits on the head's line; the newest for a step."""
    with Store(path) as store:
        return {commit.step: commit.id for commit in reversed(store.commits()) if not commit.superseded}


def on_a_terminal(*command: object, **environment: str) -> str:
    """What a command shows on a terminal, with both of its streams there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*map(str, command)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", **environment},
    ):
        os.close(theirs)
        text = b""
        try:
            while more := os.read(ours, 65536):
                text += more
        except OSError:  # the terminal is gone with the process
            pass
    os.close(ours)
    return text.decode()
