"""What is crashed: tierload_workload under the preloaded shim; and how results are told."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "tests" / "native" / "shim.c"
KEPT = ROOT / "build" / "crash"  # stores of first failures

CUT = 77  # the shim's exit code after a power cut
FAILED = 3  # tierload_workload's after an error of the engine
LIMIT_S = 60  # no run takes a tenth of a second; one that hangs is a failure


class HarnessError(Exception):
    """The test itself did not work, so it proves nothing."""


@dataclass(frozen=True)
class Call:
    """A system call that the shim counts."""

    number: int
    name: str
    path: str

    def __str__(self) -> str:
        return f"call {self.number}, {self.name} {self.path}"

    @property
    def kind(self) -> str:
        """The call and what sort of file it is on, without numbers."""
        parts = self.path.split("/")
        if parts[-1] in ("SUPER", "LOCK", "wal", "man", "seg"):
            return f"{self.name} {parts[-1]}"
        if parts[-2] in ("man", "seg"):
            return f"{self.name} {parts[-2]}/"
        return f"{self.name} wal/{parts[-1][0]}" if parts[-2] == "wal" else f"{self.name} above"


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int  # negative: a signal
    text: str  # what it printed, both streams


@dataclass(frozen=True)
class Workload:
    """One seeded workload on a store, with its log outside of it."""

    binary: Path
    shim: Path
    store: Path
    seed: int
    operations: int
    log: Path
    watched: Path  # calls below this directory are counted; above the store, so that its parents' syncs are, too
    options: tuple[str, ...] = ()

    def run(self, **settings: str) -> Ended:
        """Makes the workload, under the shim when there are settings for it."""
        return self._start("run", settings)

    def check(self, **settings: str) -> Ended:
        """Opens the store and compares it with what the log says; 0: good."""
        return self._start("check", settings)

    def calls(self, **settings: str) -> list[Call]:
        """The calls of a run that nothing disturbs. The store is there afterwards."""
        return self._calls("run", settings)

    def check_calls(self, **settings: str) -> list[Call]:
        """The same of the check."""
        return self._calls("check", settings)

    def _calls(self, verb: str, settings: dict[str, str]) -> list[Call]:
        log = self.log.with_suffix(".calls")
        log.unlink(missing_ok=True)
        ended = self._start(verb, {"log": str(log), **settings})
        if ended.code != 0:
            raise HarnessError(f"seed {self.seed}: {verb} fails undisturbed, with {ended.code}: {ended.text}")
        lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
        log.unlink()
        return [Call(int(number), name, path) for number, name, path in lines]

    def _start(self, verb: str, settings: dict[str, str]) -> Ended:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("TIERLOAD_SHIM")}
        if settings:
            environment["LD_PRELOAD"] = str(self.shim)
            environment["TIERLOAD_SHIM_DIR"] = str(self.watched)
            environment |= {f"TIERLOAD_SHIM_{name.upper()}": text for name, text in settings.items()}
        command = [self.binary, verb, self.store, str(self.seed), str(self.operations), self.log, *self.options]
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Ended(124, f"hangs: nothing after {LIMIT_S} s")
        return Ended(done.returncode, done.stdout.strip())


@dataclass
class Tally:
    """Counts of one kind of test."""

    name: str
    points: int = 0
    early: int = 0  # runs that ended before their point
    bad: int = 0
    note: str = ""
    started: float = field(default_factory=time.monotonic)
    kinds: Counter[str] = field(default_factory=Counter)

    def failure(self, text: str, kind: str) -> bool:
        """Counts a bad one; true for the first of its kind, whose text is shown."""
        self.bad += 1
        self.kinds[kind] += 1
        if self.kinds[kind] > 1:
            return False
        print(f"  BAD, {self.name}: {text}", flush=True)
        return True

    def self_test(self, found: int, may_miss: bool) -> bool:
        """For a known mistake: whether it was found as often as it must be. Missing it is what is bad."""
        self.bad = int(found == 0 and not may_miss)
        self.note = f"a mistake, found {found} times" if found else "MISSED" if self.bad else "cannot be found here"
        return self.bad == 0

    def finish(self, rows: Path | None) -> None:
        """Prints the counts, and appends them as a row of the table that run.sh prints."""
        took = time.monotonic() - self.started
        early = f", {self.early} runs ended before their point" if self.early else ""
        rate = self.points / took if took else 0
        print(
            f"{self.name}: {self.points} points{early}, {self.bad} bad; {took:.0f} s, {rate:.0f}/s"
            + (f"; {self.note}" if self.note else ""),
            flush=True,
        )
        for kind, times in self.kinds.most_common():
            print(f"  {times} bad at {kind}")
        if rows:
            with rows.open("a") as file:
                file.write("\t".join([self.name, str(self.points), str(self.bad), f"{took:.0f}", self.note]) + "\n")


def run_storm(description: str, points: int, storm: Callable[[Path, int, float, int], Tally]) -> int:
    """Runs ``storm(directory, points, seconds, seed)`` as the command line says; the exit code."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--points", type=int, default=points, help="so many ends")
    options.add_argument("--seconds", type=float, default=math.inf, help="begin no end after this")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--rows", type=Path, help="append results to this file, tab-separated")
    asked = options.parse_args()
    end_cleanly()
    directory = scratch()
    try:
        tally = storm(directory, asked.points, asked.seconds, asked.seed)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    tally.finish(asked.rows)
    return 1 if tally.bad or (tally.points < asked.points and asked.seconds == math.inf) else 0


def parser(description: str) -> argparse.ArgumentParser:
    """The options that the crash scripts share."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--seeds", type=int, default=5, help="so many workloads")
    options.add_argument("--first-seed", type=int, default=1)
    options.add_argument("--operations", type=int, default=12)
    options.add_argument("--points", type=int, default=0, help="at most so many per workload, spread; 0: every call")
    options.add_argument("--rows", type=Path, help="append results to this file, tab-separated")
    options.add_argument("--build", type=Path, default=ROOT / "build" / "release" / "native")
    return options


def spread(total: int, most: int) -> list[int]:
    """Numbers from 1 to `total`: all, or `most` of them, evenly."""
    if most == 0 or most >= total:
        return list(range(1, total + 1))
    return sorted({1 + i * (total - 1) // max(1, most - 1) for i in range(most)})


def scratch() -> Path:
    """A directory for logs and the shim, on a tmpfs where there is one; never on a disk that is cut."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="tierload-crash-", dir=shm if os.access(shm, os.W_OK) else None))


def compile_shim(into: Path, source: Path = SHIM) -> Path:
    """Compiles the shim, or another library to preload."""
    shim = into / f"{source.stem}.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", shim, source, "-ldl"]
    subprocess.run(command, check=True)
    return shim


def binary(build: Path, into: Path) -> Path:
    """A copy of tierload_workload, so that a build beside us changes nothing."""
    program = build / "tierload_workload"
    if not program.exists():
        raise HarnessError(f"{program} is missing: run `make build`")
    return Path(shutil.copy(program, into))


def keep(store: Path, log: Path, name: str) -> str:
    """Keeps a store and its log for a person to look at."""
    into = KEPT / name
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    if store.exists():
        shutil.copytree(store, into / "store")
    if log.exists():
        shutil.copy(log, into / "log")
    return f"kept in {into}"


def end_cleanly() -> None:
    """Turns signals that end us into exceptions, so that everything is given back."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
