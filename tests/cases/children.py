"""Other processes: forked ones that are killed or watched, and fresh ones that run a script of this folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

Say = Callable[[object], None]


def _forked(body: Callable[[Say], None]) -> tuple[int, int]:
    """A child that runs ``body``, and the end of the pipe that its words arrive at."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            torch.set_num_threads(1)
            body(lambda word: os.write(writing, f"{word}\n".encode()) and None)
        except BaseException:  # noqa: BLE001
            os.write(writing, ("ERROR\n" + traceback.format_exc()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def _words(reading: int) -> list[str]:
    with os.fdopen(reading, "r") as pipe:
        words = pipe.read().splitlines()
    assert "ERROR" not in words, "\n".join(words)
    return words


def killed(body: Callable[[Say], None], after_s: float) -> list[str]:
    """Fork a child that runs ``body``, kill it after some time, and return what it said until then."""
    child, reading = _forked(body)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return _words(reading)


@contextmanager
def beside(body: Callable[[Say], None]) -> Iterator[list[str]]:
    """Run ``body`` in a child beside the block; it is killed at the end, and the list is then what it said."""
    child, reading = _forked(body)
    words: list[str] = []
    try:
        yield words
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        words += _words(reading)


def strace(log: Path, calls: Sequence[str], *options: str) -> tuple[str, ...]:
    """What a command is run under, so that its system calls are in ``log``. The test is skipped where that is not to
    be had."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed: apt-get install strace")
    # Only these calls stop: to import torch takes hundreds of thousands of others.
    trace = ("-e", f"trace={','.join(calls)}", "-e", "signal=none")
    return (program, "-f", "--seccomp-bpf", "-qq", "-y", "-s", "16", "-o", str(log), *trace, *options)


def script(name: str, *arguments: object, under: tuple[str, ...] = (), **environment: str) -> str:
    """Run ``tests/cases/<name>.py`` in a fresh interpreter and return what it printed."""
    command = [*under, sys.executable, "-m", f"tests.cases.{name}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
