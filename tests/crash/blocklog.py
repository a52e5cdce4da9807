#!/usr/bin/env python3
"""Logs every block that a workload of the direct engine writes, and cuts the power at every one of them.

The direct engine moves data by io_uring and O_DIRECT, which a preloaded shim does not see. So the workload runs in
user-mode Linux (guest.sh) on a file system whose writes dm-log-writes logs, with a mark for whatever was begun and
acknowledged. Each state that a power cut may leave (blocks.py) is then put on a disk of the host, mounted, and checked
like in powercut.py. The file system of the guest's kernel wrote it; that of the host's recovers it.

First, self-tests: with syncs that lie, commits must be lost; and so they must when blocks that the ring wrote are
missing although they were flushed. Exit code 0: nothing bad; 1: something bad, or a known mistake that was not found;
5: this machine cannot do it, the last line says why.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from blocks import BLOCK, Cut, Entry, Image, cuts, read_log
from disk import DISK_BYTES, MKFS, Disk, Unavailable
from powercut import UNAVAILABLE
from victim import (
    LIMIT_S,
    ROOT,
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

KERNEL = "linux.uml"
MODULES = Path("/usr/lib/uml/modules")
XSTATE = ROOT / "tests" / "native" / "uml_xstate.c"
GUEST = ROOT / "tests" / "crash" / "guest.sh"
LOG_BYTES = 1 << 30  # takes only what is written
FIBMAP = 1


@dataclass(frozen=True)
class Lie:
    """A known mistake: syncs below a directory that report success and do nothing."""

    calls: str = ""
    below: str = "store"
    may_hide: bool = False


NO_LIE = Lie()
LIES = {
    "nothing is synced": Lie("1"),
    "the journal is not synced": Lie("fdatasync", "store/wal"),
    "manifests are not synced": Lie("fdatasync", "store/man"),
    # The disk has what the ring wrote when finish() returns, so the next file's sync covers it, log and flush.
    "segments are not synced": Lie("fdatasync", "store/seg", may_hide=True),
}


class Guest:
    """Runs workloads in user-mode Linux."""

    def __init__(self, directory: Path, fs: str) -> None:
        for tool in (KERNEL, "dmsetup", "insmod"):
            if not shutil.which(tool):
                raise Unavailable(f"{tool} is not installed")
        found = list(MODULES.glob("*/kernel/drivers/md/dm-log-writes.ko"))
        if not found:
            raise Unavailable(f"dm-log-writes is not in {MODULES}")
        self.modules = found[0].parent
        self.directory = directory
        self.fs = fs
        self.preload = compile_shim(directory, XSTATE)
        self.base = directory / "base"
        self._sparse(self.base, DISK_BYTES)
        subprocess.run([*MKFS[fs], self.base], check=True, capture_output=True)
        self.image = Image.of(self.base)
        self.runs: dict[tuple[int, Lie], tuple[list[Entry], int]] = {}

    def _sparse(self, path: Path, size: int) -> Path:
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
        return path

    def run(self, seed: int, operations: int, lie: Lie = NO_LIE) -> tuple[list[Entry], int]:
        """What a workload makes the disk write, and how many bytes of it went past the page cache. Runs it once."""
        if (seed, lie) not in self.runs:
            self.runs[seed, lie] = self._run(seed, operations, lie)
        return self.runs[seed, lie]

    def _run(self, seed: int, operations: int, lie: Lie) -> tuple[list[Entry], int]:
        for name in ("started", "ended", "output"):
            (self.directory / name).unlink(missing_ok=True)
        disk = Path(shutil.copy(self.base, self.directory / "disk"))
        log = self._sparse(self.directory / "blocks", LOG_BYTES)
        said = self._boot(disk, log, seed=seed, operations=operations, lie=lie.calls, liar=lie.below)
        if not (self.directory / "started").exists():
            why = re.search("Kernel panic.*", said)
            raise Unavailable(f"{KERNEL} does not start: {why[0] if why else said.strip()[-200:]}")
        output = (self.directory / "output").read_text() if (self.directory / "output").exists() else ""
        ended = (self.directory / "ended").read_text() if (self.directory / "ended").exists() else "nothing"
        if ended.strip() != "0":
            raise HarnessError(f"seed {seed}: the guest ends with {ended.strip()}: {output}{said[-2000:]}")
        direct = re.search(r"direct bytes (\d+)", output)
        return read_log(log), int(direct[1]) if direct else 0

    def _boot(self, disk: Path, log: Path, **settings: object) -> str:
        """Starts the kernel and waits for its end. Returns what it said."""
        settings |= {"scratch": self.directory, "fs": self.fs, "modules": self.modules, "uml_dir": self.directory}
        command = [KERNEL, "mem=256M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"]
        command += ["con=null", "con0=null,fd:1", f"init={GUEST}", f"ubd0={disk}", f"ubd1={log}"]
        command += [f"{name}={value}" for name, value in settings.items()]
        running = subprocess.Popen(
            command,
            env=os.environ | {"LD_PRELOAD": str(self.preload), "LD_BIND_NOW": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        try:
            return running.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            raise HarnessError(f"{KERNEL} hangs: nothing after {LIMIT_S} s") from None
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)  # it has processes of its own, one for each of the guest's
                running.communicate()


class Replay:
    """Puts states of a disk on a device and checks them."""

    def __init__(self, disk: Disk, guest: Guest, program: Path, shim: Path, rows: Path | None) -> None:
        self.disk = disk
        self.guest = guest
        self.program = program
        self.shim = shim
        self.rows = rows

    def workload(self, seed: int, operations: int) -> Workload:
        """What is to be checked."""
        store, log = self.disk.directory / "store", self.guest.directory / "log"
        return Workload(self.program, self.shim, store, seed, operations, log, self.disk.directory, ("--direct",))

    def mounted(self, image: Image, cut: Cut, log: Path) -> str:
        """Mounts what a cut left. Returns why it cannot be mounted."""
        log.write_text("".join(f"{mark}\n" for mark in cut.marks if mark[0] in "abd"))
        if self.disk.mounted:
            self.disk.unmount()
        image.put(self.disk.device.path, cut.writes)
        try:
            self.disk.mount()
        except OSError as error:
            return str(error)
        return ""

    def check(self, image: Image, cut: Cut, run: Workload) -> Ended:
        """Mounts what a cut left, and compares."""
        why = self.mounted(image, cut, run.log)
        return Ended(-1, f"does not mount: {why}") if why else run.check()

    def sweep(self, seeds: range, operations: int, points: int) -> int:
        """Every cut (or `points` of them) of every workload."""
        tally = Tally(f"block log, {self.guest.fs}, io_uring and O_DIRECT")
        writes = direct = 0
        for seed in seeds:
            log, moved = self.guest.run(seed, operations)
            direct += moved
            writes += sum(1 for entry in log if entry.data)
            run = self.workload(seed, operations)
            wanted = self.wanted(log, seed, points)
            image = self.guest.image.copy()
            for number, cut in enumerate(cuts(image, log, str(seed)), 1):
                if number not in wanted:
                    continue
                tally.points += 1
                ended = self.check(image, cut, run)
                if ended.code == 0:
                    continue
                where = f"entry {cut.position} of {len(log)}, {cut.kind}"
                story = f"seed {seed}, {operations} operations, {where}: {ended.text} (exit code {ended.code})"
                if tally.failure(f"{story}\n    log: {' '.join(cut.marks)}", cut.kind):
                    self.mounted(image, cut, run.log)
                    name = f"{tally.name}-seed{seed}-{number}".replace(" ", "-").replace(",", "")
                    print(f"    {keep(run.store, run.log, name)}", flush=True)
        if direct == 0:
            raise HarnessError("nothing went past the page cache")
        tally.note = f"{len(seeds)} workloads; {writes} writes to the disk, {direct >> 10} KiB past the page cache"
        tally.finish(self.rows)
        return tally.bad

    def wanted(self, log: list[Entry], seed: int, points: int) -> set[int]:
        """The numbers of the cuts to make: all, or `points` of them."""
        return set(spread(sum(1 for _ in cuts(self.guest.image.copy(), log, str(seed))), points))

    def find_lies(self, seed: int, operations: int, lies: list[str]) -> int:
        """A self-test. Returns how many known mistakes were missed."""
        missed = 0
        for what in lies:
            lie = LIES[what]
            tally = Tally(f"self-test: {what}, block log, {self.guest.fs}")
            log, _ = self.guest.run(seed, operations, lie)
            wanted = self.wanted(log, seed, 40)
            image = self.guest.image.copy()
            found = 0
            for number, cut in enumerate(cuts(image, log, str(seed)), 1):
                if number in wanted:
                    tally.points += 1
                    found += self.check(image, cut, self.workload(seed, operations)).code != 0
            missed += not tally.self_test(found, may_miss=lie.may_hide)
            tally.finish(self.rows)
        return missed

    def find_lost(self, seed: int, operations: int) -> int:
        """A self-test: at the end, a block that the ring wrote is what it was before. Returns 1 when that is missed."""
        tally = Tally(f"self-test: a flushed block is lost, block log, {self.guest.fs}")
        log, _ = self.guest.run(seed, operations)
        image, before = self.guest.image.copy(), self.guest.image.memory
        *_, last = (cut for cut in cuts(image, log, "") if cut.kind == "all")
        run = self.workload(seed, operations)
        if why := self.mounted(image, last, run.log):
            raise HarnessError(f"seed {seed}: the disk does not mount at the end: {why}")
        blocks = segment_blocks(run.store)
        written = {(entry.offset + at) // BLOCK for entry in log for at in range(0, len(entry.data), BLOCK)}
        if not blocks or not blocks <= written:
            raise HarnessError(f"{len(blocks - written)} of {len(blocks)} blocks of segments are not in the log")
        found = 0
        for number in spread(len(blocks), 12):
            at = sorted(blocks)[number - 1] * BLOCK
            lost = Cut("lost", last.position, [*last.writes, (at, before[at : at + BLOCK])], last.marks)
            tally.points += 1
            found += self.check(image, lost, run).code != 0
        missed = not tally.self_test(found, may_miss=False)
        tally.finish(self.rows)
        return int(missed)


def segment_blocks(store: Path) -> set[int]:
    """Where the segments lie on the disk."""
    blocks = set()
    for path in (store / "seg").iterdir():
        with path.open("rb") as file:
            for number in range(-(-path.stat().st_size // BLOCK)):
                place = fcntl.ioctl(file, FIBMAP, struct.pack("i", number))
                blocks.add(struct.unpack("i", place)[0])
    return blocks - {0}  # 0: a hole


def main() -> int:
    """Runs everything on one file system."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--fs", choices=MKFS, default="ext4")
    options.add_argument("--lies", nargs="*", choices=LIES, default=list(LIES), help="mistakes of the self-test")
    asked = options.parse_args()
    end_cleanly()
    directory = scratch()
    try:
        program, shim = binary(asked.build, directory), compile_shim(directory)
        with Disk(asked.fs) as disk:
            replay = Replay(disk, Guest(directory, asked.fs), program, shim, asked.rows)
            bad = replay.find_lies(asked.first_seed, asked.operations, asked.lies)
            bad += replay.find_lost(asked.first_seed, asked.operations)
            seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
            bad += replay.sweep(seeds, asked.operations, asked.points)
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
