"""Scripts that end while saves are in flight: what runs them, and what they find on stderr."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cases.children import ROOT

TERM, INT = -signal.SIGTERM, -signal.SIGINT
WAITING = "tierload: waiting for the save of step 200 into runs/gpt before the process ends: 1.0 KiB of about 1.0 MiB"
FINISHING = (
    "tierload: SIGTERM: finishing the save of step 200 into runs/gpt, for up to 600 s; a second signal ends at once\n"
)
FAILED = "tierload: the save of step 200 into runs/gpt failed in the background: OSError: no room for step 200\n"

_HANG_S = 120


class Script:
    """A script that runs in a process of its own."""

    def __init__(self, code: str, folder: Path, how: str = "file") -> None:
        torch = "import torch\n" * ("torch" in code or "tierload" in code)
        code = f"{torch}import os, signal, sys\nfrom tests.api.fake_saves import *\n{textwrap.dedent(code)}"
        path = folder / "script.py"
        path.write_text(code)
        words = {"file": [str(path)], "-c": ["-c", code], "-m": ["-m", "script"], "stdin": ["-"]}[how]
        go, self._go = os.pipe()
        environment = os.environ | {"GO": str(go), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[go],
            env=environment,
            text=True,
        )
        os.close(go)
        self._timer = threading.Timer(_HANG_S, self.process.kill)
        self._timer.start()
        if how == "stdin":
            assert self.process.stdin is not None
            self.process.stdin.write(code)
            self.process.stdin.close()
            self.process.stdin = None
        self.out = self.err = ""

    def hears(self, text: str) -> None:
        """Waits for a line on stdout."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out += line
            if line == text + "\n":
                return
        self._fail(text)

    def complains(self, text: str) -> None:
        """Waits for a line on stderr that begins so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err += line
            if line.startswith(text):
                return
        self._fail(text)

    def _fail(self, text: str) -> None:
        self.ends()
        pytest.fail(f"it ended ({self.process.returncode}) without {text!r}:\n{self.out}{self.err}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def go(self) -> None:
        """Lets the oldest save end."""
        os.write(self._go, b".")

    def ends(self) -> int:
        """Its status; ``out`` and ``err`` are then all that it wrote."""
        out, err = self.process.communicate()
        self.out += out
        self.err += err
        return self.process.returncode

    def close(self) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()
        os.close(self._go)


Start = Callable[..., Script]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Start]:
    scripts: list[Script] = []

    def start(code: str, how: str = "file") -> Script:
        scripts.append(Script(code, tmp_path, how))
        return scripts[-1]

    yield start
    for one in scripts:
        one.close()
