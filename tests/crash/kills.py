#!/usr/bin/env python3
"""Kills a workload at every system call, kills the recovery after it, and makes every system call fail.

These are tests of kills and of errors. What a killed process wrote is still in the page cache, so **this proves nothing
about power loss**: not one missing sync can be found here (the self-test shows that, too). powercut.py is for that.

After a failed call the engine must say which file it was, and after everything the store must hold what was
acknowledged. Calls that are only interrupted or done by half must not be noticed at all.

Exit code 0: nothing bad; 1: something bad, or a known mistake that was not found.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from victim import (
    FAILED,
    Call,
    Ended,
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

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EMFILE")
# What the engine may bear without an error: one bad copy of what it has twice (docs/FORMAT.md section 10), and garbage
# of an abort that cannot be removed, which collect() removes another time (catalog.cpp).
MIRRORED = ("/wal/c-", "/wal/m-", "/man/")
GARBAGE = ("/man/", "/seg/")


def may_be_borne(call: Call, fault: str) -> bool:
    """Whether a run may end well although this call failed."""
    if call.name.startswith("unlink"):
        return any(part in call.path for part in GARBAGE)
    reads = call.name.startswith(("open", "pread"))
    return fault == "EIO" and reads and any(part in call.path for part in MIRRORED)


def names_it(ended: Ended, call: Call, store: Path) -> bool:
    """Whether the error says which file it was. For what lies above the store, the store's name is what people know."""
    above = str(store).startswith(call.path)
    return call.path in ended.text or (above and str(store) in ended.text)


class Killer:
    """Workloads in directories of their own, some at a time."""

    def __init__(self, program: Path, shim: Path, operations: int, rows: Path | None) -> None:
        self.program = program
        self.shim = shim
        self.operations = operations
        self.rows = rows
        self.lock = Lock()
        self.borne: Counter[str] = Counter()

    def workload(self, name: str, seed: int) -> Workload:
        """A workload in a new directory."""
        disk = self.shim.parent / name / "disk"
        disk.mkdir(parents=True)
        return Workload(self.program, self.shim, disk / "above" / "store", seed, self.operations, disk / "../log", disk)

    def calls(self, seed: int, **settings: str) -> list[Call]:
        """The calls of an undisturbed run."""
        run = self.workload(f"calls-{seed}", seed)
        found = run.calls(**settings)
        shutil.rmtree(run.watched.parent)
        return found

    def at_each(self, tally: Tally, seed: int, calls: Iterable[Call], action: Callable[[Workload, Call], str]) -> None:
        """Does `action` at each call; what it returns is bad, "" is good."""

        def point(call: Call) -> None:
            run = self.workload(f"{seed}-{call.number}", seed)
            # Paths in `calls` are those of another directory.
            there = call.path.replace(f"/calls-{seed}", f"/{run.watched.parent.name}")
            here = Call(call.number, call.name, there)
            wrong = action(run, here)
            with self.lock:
                tally.points += 1
                if wrong:
                    log = " ".join(run.log.read_text().split()) if run.log.exists() else "none"
                    story = f"seed {seed}, {self.operations} operations, at {here}: {wrong}\n    log: {log}"
                    if tally.failure(story, call.kind):
                        print(f"    {keep(run.store, run.log, f'{tally.name}-{seed}-{call.number}'.replace(' ', '-'))}")
            shutil.rmtree(run.watched.parent)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(point, calls):
                pass

    def sweep(self, name: str, seeds: range, points: int, action: Callable[[Workload, Call], str], **reads: str) -> int:
        """`action` at every call (or `points` of them) of every workload."""
        tally = Tally(name)
        for seed in seeds:
            calls = self.calls(seed, **reads)
            self.at_each(tally, seed, [calls[number - 1] for number in spread(len(calls), points)], action)
        tally.note = f"{len(seeds)} workloads"
        tally.finish(self.rows)
        return tally.bad

    def kill(self, run: Workload, call: Call) -> str:
        """kill -9 at this call."""
        ended = run.run(at=str(call.number), do="kill")
        if ended.code != -signal.SIGKILL:
            raise HarnessError(f"the run ends with {ended.code}, not by a kill at {call}: {ended.text}")
        return wrong_after(run)

    def fail(self, fault: str, **reads: str) -> Callable[[Workload, Call], str]:
        """An action: this call fails with an errno, or is cut short."""
        do = "short" if fault == "short" else f"errno:{getattr(errno, fault)}"

        def action(run: Workload, call: Call) -> str:
            ended = run.run(at=str(call.number), do=do, **reads)
            if ended.code == 0:
                if fault not in ("short", "EINTR") and not may_be_borne(call, fault):
                    return f"{fault} is swallowed: the run ends as if nothing had happened"
                if fault not in ("short", "EINTR"):
                    with self.lock:
                        self.borne[call.kind] += 1
            elif ended.code != FAILED:
                return f"{fault}: the run ends with {ended.code}: {ended.text}"
            elif fault in ("short", "EINTR"):
                return f"{fault} is no error, but the run ends with: {ended.text}"
            elif not names_it(ended, call, run.store) or f"({fault})" not in ended.text:
                return f"{fault}: the message does not name file and reason: {ended.text}"
            return wrong_after(run)

        return action

    def recoveries(self, seed: int, stores: int) -> int:
        """kill -9 at every call of the opening of stores that a kill left."""
        tally = Tally("kill -9 in recovery")
        calls = self.calls(seed)
        for number in spread(len(calls), stores):
            source = self.workload(f"source-{seed}-{number}", seed)
            source.run(at=str(number), do="kill")
            probe = self.workload(f"calls-{seed}", seed)
            fill(probe, source)
            if wrong := wrong_after(probe):
                tally.failure(f"seed {seed}, killed at {calls[number - 1]}: {wrong}", calls[number - 1].kind)
                opening = []
            else:
                shutil.rmtree(probe.store)
                fill(probe, source)
                opening = probe.check_calls()
            shutil.rmtree(probe.watched.parent)

            def action(run: Workload, call: Call, source: Workload = source, cut: Call = calls[number - 1]) -> str:
                fill(run, source)
                ended = run.check(at=str(call.number), do="kill")
                if ended.code != -signal.SIGKILL:
                    raise HarnessError(f"the check ends with {ended.code}, not by a kill at {call}: {ended.text}")
                wrong = wrong_after(run)
                return f"{wrong} (the store was left by a kill at {cut})" if wrong else ""

            self.at_each(tally, seed, opening, action)
            shutil.rmtree(source.watched.parent)
        tally.note = f"{stores} stores"
        tally.finish(self.rows)
        return tally.bad

    def find_drops(self, seed: int) -> int:
        """The self-test: writes that are dropped are found; syncs that lie cannot be. Returns what was missed."""
        dropped, lied = Tally("self-test: later writes are dropped"), Tally("self-test: syncs lie, then a kill")
        drops = lies = 0
        calls = self.calls(seed)
        for number in spread(len(calls), 20):
            run = self.workload(f"drop-{number}", seed)
            run.run(at=str(number), do="drop")
            dropped.points += 1
            drops += run.check().code != 0
            shutil.rmtree(run.watched.parent)
            run = self.workload(f"lie-{number}", seed)
            run.run(at=str(number), do="kill", lie="1")
            lied.points += 1
            lies += run.check().code != 0
            shutil.rmtree(run.watched.parent)
        dropped.self_test(drops, may_miss=False)
        lied.self_test(lies, may_miss=True)
        dropped.finish(self.rows)
        lied.finish(self.rows)
        return dropped.bad


def fill(run: Workload, source: Workload) -> None:
    """Copies a store and its log."""
    if source.store.exists():
        shutil.copytree(source.store, run.store)
    if source.log.exists():
        shutil.copy(source.log, run.log)


def wrong_after(run: Workload) -> str:
    """What a check finds to be wrong, or nothing."""
    ended = run.check()
    return "" if ended.code == 0 else f"the check ends with {ended.code}: {ended.text}"


def main() -> int:
    """Runs everything."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--errors", default=",".join(ERRORS), help="errnos to inject; empty: kills only")
    options.add_argument("--recoveries", type=int, default=8, help="crashed stores whose recovery is crashed as well")
    asked = options.parse_args()
    end_cleanly()
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    directory = scratch()
    try:
        killer = Killer(binary(asked.build, directory), compile_shim(directory), asked.operations, asked.rows)
        bad = killer.find_drops(asked.first_seed)
        bad += killer.sweep("kill -9", seeds, asked.points, killer.kill)
        bad += killer.recoveries(asked.first_seed, asked.recoveries) if asked.recoveries else 0
        faults = asked.errors.split(",") if asked.errors else []
        reads = {"reads": "1"}
        for fault in [*faults, "EINTR", "short"] if faults else []:
            bad += killer.sweep(f"{fault} at a call", seeds, asked.points, killer.fail(fault, **reads), **reads)
        for what, times in sorted(killer.borne.items()):
            print(f"  borne without an error: {what} ({times} times)")
    except HarnessError as why:
        print(f"the test does not work: {why}")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
