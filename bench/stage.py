"""What the demonstration stands on: narration, checks, and the processes that it starts, watches and kills."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Stage", "Trainer", "copy_with_flip", "environment", "flip", "kill_in_save", "megabytes"]

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 104  # of what is told
COMMAND_WIDTH = 118  # of what commands print


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def environment() -> dict[str, str]:
    # Threads that wait for work must not spin: others use this machine too. The number of threads is fixed
    # (bench/train.py), and MKL must not choose another one by itself: the order of additions depends on it.
    return os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "COLUMNS": str(COMMAND_WIDTH),
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


class Stage:
    """Says what happens, act by act, and remembers what did not hold. ``commands`` are shown as a person types them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: list[str] = []
        self._act = 0

    def act(self, title: str) -> None:
        self._act += 1
        print(f"\n{self._act}. {title}")

    def say(self, text: str) -> None:
        print(textwrap.fill(text, WIDTH, initial_indent="   ", subsequent_indent="   "), flush=True)

    def lines(self, text: str) -> None:
        for line in text.rstrip().splitlines():
            shown = textwrap.fill(line, COMMAND_WIDTH, subsequent_indent="    ") if len(line) > COMMAND_WIDTH else line
            print(textwrap.indent(shown, " " * 6), flush=True)

    def check(self, holds: bool, text: str) -> bool:
        """A claim of this demonstration: shown, and when it does not hold, the demonstration fails at its end."""
        first = "   ok: " if holds else "   FAILED: "
        print(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent="       "), flush=True)
        if not holds:
            self.failures.append(text)
        return holds

    def command(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs ``tierload ARGUMENTS`` and shows what it printed, without the name of the temporary folder."""
        done = subprocess.run(
            [sys.executable, "-m", "tierload", *map(str, arguments)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        typed = " ".join(map(str, ["$ tierload", *arguments]))
        self.lines(f"{typed}\n{done.stdout}{done.stderr}".replace(f"{self.folder}/", ""))
        return done


class Trainer:
    """A process of ``bench.train`` (or another module that prints JSON lines); ``events`` yields what it tells."""

    def __init__(
        self, stage: Stage, *arguments: object, module: str = "bench.train", more: Mapping[str, str] | None = None
    ) -> None:
        rank = "" if more is None else more.get("RANK", "")
        self._log = stage.folder / f"child{rank}.log"
        with open(self._log, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=ROOT,
                env=environment() | dict(more or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def events(self) -> Iterator[dict[str, object]]:
        """Until the process ends.

        Raises:
            RuntimeError: It failed; the message is what it said last.
        """
        yield from self.lines()
        if self.process.wait() not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{self.process.args} ended with {self.process.returncode}:\n{self._log.read_text()}")

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it tells, whatever becomes of it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def kill_in_save(
    trainer: Trainer, store: Path, share: float = 0.4, patience_s: float = 60.0, among: str = ""
) -> dict[str, int]:
    """Waits until the save that has just begun has written a good part of its segment, then sends SIGKILL.

    Returns the bytes written of the files that were not there before, by name. ``share`` is of the last save's segment.
    ``among`` is in the names of the segments that count.
    """
    before = _written(store)
    wanted = share * max(size for name, size in before.items() if name.startswith("seg/") and among in name)
    end = time.monotonic() + patience_s
    while time.monotonic() < end and trainer.process.poll() is None:
        for path in (store / "seg").iterdir():
            if among in path.name and f"seg/{path.name}" not in before and _data_of(path) >= wanted:
                trainer.kill()
                return {name: size for name, size in _written(store).items() if name not in before}
        time.sleep(0.0005)
    trainer.kill()
    raise RuntimeError(f"no save was seen to write a segment in {store}/seg within {patience_s} s")


def _written(store: Path) -> dict[str, int]:
    return {str(path.relative_to(store)): _data_of(path) for path in store.rglob("*") if path.is_file()}


def _data_of(path: Path) -> int:
    """Bytes of a file that have been written: a segment is given room for all of them before the first."""
    total, at = 0, 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while True:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
            end = os.lseek(descriptor, at, os.SEEK_HOLE)
            total, at = total + end - at, end
    except OSError as error:
        if error.errno != errno.ENXIO:  # no more data
            raise
        return total
    finally:
        os.close(descriptor)


def copy_with_flip(store: Path, copy: Path, segment: str, offset: int) -> None:
    """Copies a store and flips one bit of one byte in the copy. Other segments are linked: they are only read."""

    def link_or_copy(source: str, target: str) -> None:
        same = Path(source).parent.name == "seg" and Path(source).name != segment
        (os.link if same else shutil.copyfile)(source, target)

    shutil.copytree(store, copy, copy_function=link_or_copy)
    flip(copy / "seg" / segment, offset)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
