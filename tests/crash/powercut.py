#!/usr/bin/env python3
"""Cuts the power of a real file system at every system call of a workload, and of the recovery after it.

Three kinds of cut, each at call 1, 2, 3, ... until the run ends before its cut:

* plain: nothing reaches the device that was not synced. The shim makes the cut inside the process.
* with write-back: the kernel had begun to write on its own. The process is killed at the call; then random files are
  written back or synced, in random order, and then the power goes.
* in recovery: a store after a plain cut is opened, and the power is cut at every call of that.

First, a self-test: with a sync that lies, commits must be lost. Exit code 0: nothing bad; 1: something bad, or a
known mistake that was not found; 5: this machine cannot cut power, the last line says why.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from disk import MKFS, Disk, Unavailable, libc
from victim import (
    CUT,
    Call,
    HarnessError,
    Tally,
    Workload,
    binary,
    compile_shim,
    end_cleanly,
    keep,
    parser,
    scratch,
    spread,
)

WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER
UNAVAILABLE = 5
LIES = {"1": "fsync and fdatasync do nothing", "fdatasync": "fdatasync does nothing", "fsync": "fsync does nothing"}
# Only directories get an fsync here, and any fdatasync of a new file commits the whole log of ext4 and XFS, names
# included. So these file systems can hide a missing directory sync; the simulated one does not.
MAY_HIDE = {"fsync"}

libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def write_back(store: Path, seed: str) -> None:
    """What a kernel may have done by now: bytes of some files written, in place; now and then a commit of the log."""
    chance = random.Random(seed)
    paths = sorted(path for path in store.rglob("*"))
    chance.shuffle(paths)
    share = chance.random()
    for path in paths:
        if chance.random() >= share:
            continue
        with opened(path) as fd:
            if path.is_file():
                libc.sync_file_range(fd, 0, 0, WRITE_AND_WAIT)
            if chance.random() < 0.15:
                os.fsync(fd)


class Cutter:
    """Workloads on one disk. Every run has a new directory: what a cut brings back of an old one is in nobody's way."""

    def __init__(self, disk: Disk, program: Path, shim: Path, rows: Path | None) -> None:
        self.disk = disk
        self.program = program
        self.shim = shim
        self.rows = rows
        self.runs = 0

    def workload(self, seed: int, operations: int) -> Workload:
        """A workload in a directory of its own, that it has to make, and its parent; the disk is emptied before."""
        self.disk.empty()
        self.runs += 1
        store = self.disk.directory / f"run-{self.runs}" / "store"
        return Workload(self.program, self.shim, store, seed, operations, self.shim.parent / "log", self.disk.directory)

    def plain(self, run: Workload, call: int, **lie: str) -> bool:
        """A run that is cut at this call; false when it ended before. The disk is mounted again."""
        ended = run.run(at=str(call), do="shutdown", mount=str(self.disk.directory), **lie)
        if ended.code not in (0, CUT):
            raise HarnessError(f"seed {run.seed}, call {call}: the run ends with {ended.code}, not {CUT}: {ended.text}")
        if ended.code == 0 and not lie:
            return False
        if ended.code == 0:
            self.disk.cut()
        self.disk.remount()
        return True

    def written_back(self, run: Workload, call: int) -> bool:
        """The same after some write-back."""
        ended = run.run(at=str(call), do="kill")
        if ended.code == 0:
            return False
        if ended.code != -signal.SIGKILL:
            raise HarnessError(f"seed {run.seed}, call {call}: the run ends with {ended.code}: {ended.text}")
        write_back(run.store, f"{run.seed}/{call}")
        self.disk.cut()
        self.disk.remount()
        return True

    def recovery_of(self, template: Path, run: Workload, call: int) -> bool:
        """An opening of a copy of a store that is cut at this call."""
        shutil.copytree(template, run.store)
        self.disk.sync()
        ended = run.check(at=str(call), do="shutdown", mount=str(self.disk.directory))
        if ended.code not in (0, CUT):
            raise HarnessError(f"seed {run.seed}, call {call} of the check: it ends with {ended.code}: {ended.text}")
        if ended.code == 0:
            return False
        self.disk.remount()
        return True

    def judge(self, tally: Tally, run: Workload, call: Call | int, again: Callable[[], object]) -> bool:
        """Checks the store; the first bad one of a tally is shown, made again, and kept."""
        ended = run.check()
        if ended.code == 0:
            return True
        log = " ".join(run.log.read_text().split()) if run.log.exists() else "none"
        story = f"seed {run.seed}, {run.operations} operations, cut at {call}: {ended.text} (exit code {ended.code})"
        if tally.failure(f"{story}\n    log: {log}", call.kind if isinstance(call, Call) else "recovery"):
            shutil.rmtree(run.store, ignore_errors=True)
            again()
            name = f"{tally.name}-seed{run.seed}-{call if isinstance(call, int) else call.number}".replace(" ", "-")
            print(f"    {keep(run.store, run.log, name)}", flush=True)
        return False

    def cuts(self, kind: str, how: Callable[[Workload, int], bool], seeds: range, operations: int, points: int) -> int:
        """Cuts at every call (or `points` of them) of every workload."""
        tally = Tally(f"{kind}, {self.disk.name}")
        changing = 0
        for seed in seeds:
            calls = self.workload(seed, operations).calls()
            numbers = spread(len(calls), points) + ([len(calls) + 1] if points == 0 else [])
            for number in numbers:
                run = self.workload(seed, operations)
                if not how(run, number):
                    tally.early += 1
                    if number <= len(calls):
                        raise HarnessError(f"seed {seed}: {calls[number - 1]} is never reached")
                    continue
                tally.points += 1
                if number > len(calls):
                    raise HarnessError(f"seed {seed}: {number} calls this time, {len(calls)} before")
                call = calls[number - 1]
                changing += "open" not in call.name
                self.judge(tally, run, call, lambda run=run, number=number: how(run, number))
        tally.note = f"{len(seeds)} workloads; {changing} points at calls other than opens"
        tally.finish(self.rows)
        return tally.bad

    def recoveries(self, seed: int, operations: int, stores: int) -> int:
        """Cuts the power at every call of the opening of stores that a cut left."""
        tally = Tally(f"power cut in recovery, {self.disk.name}")
        template = self.shim.parent / "template"
        calls = self.workload(seed, operations).calls()
        for number in spread(len(calls), stores):
            source = self.workload(seed, operations)
            self.plain(source, number)
            shutil.rmtree(template, ignore_errors=True)
            shutil.copytree(source.store, template) if source.store.exists() else template.mkdir()
            if not self.judge(tally, source, calls[number - 1], partial(self.plain, source, number)):
                continue
            for call in count(1):
                run = self.workload(seed, operations)
                again = partial(self.recovery_of, template, run, call)
                if not again():
                    tally.early += 1
                    break
                tally.points += 1
                if not self.judge(tally, run, call, again):
                    print(f"    (the store was left by a cut at {calls[number - 1]})", flush=True)
        tally.note = f"{stores} stores"
        tally.finish(self.rows)
        return tally.bad

    def find_lies(self, seed: int, operations: int) -> int:
        """The self-test. Returns how many known mistakes were missed."""
        missed = 0
        for lie, what in LIES.items():
            tally = Tally(f"self-test: {what}, {self.disk.name}")
            found = 0
            for number in spread(len(self.workload(seed, operations).calls()), 12):
                run = self.workload(seed, operations)
                self.plain(run, number, lie=lie)
                tally.points += 1
                found += run.check().code != 0
            missed += not tally.self_test(found, may_miss=lie in MAY_HIDE)
            tally.finish(self.rows)
        return missed


def main() -> int:
    """Runs everything on one file system."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--fs", choices=MKFS, default="ext4")
    options.add_argument("--recoveries", type=int, default=8, help="crashed stores whose recovery is crashed as well")
    asked = options.parse_args()
    end_cleanly()
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    directory = scratch()
    try:
        program, shim = binary(asked.build, directory), compile_shim(directory)
        with Disk(asked.fs) as disk:
            cutter = Cutter(disk, program, shim, asked.rows)
            bad = cutter.find_lies(asked.first_seed, asked.operations)
            bad += cutter.cuts("power cut", cutter.plain, seeds, asked.operations, asked.points)
            name = "power cut after write-back"
            bad += cutter.cuts(name, cutter.written_back, seeds, asked.operations, asked.points)
            if asked.recoveries:
                bad += cutter.recoveries(asked.first_seed, asked.operations, asked.recoveries)
    except Unavailable as why:
        print(why)
        return UNAVAILABLE
    except HarnessError as why:
        print(f"the test does not work: {why}")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
