#!/usr/bin/env python3
"""Ends a training run that saves in the background, by signals at random moments, and starts it again.

After each end the store opens, the newest commit that the run had acknowledged is there or a newer one is, every commit
loads bit for bit as one step had it, and the run continues from there. As with all kills, this proves nothing about
power loss: powercut.py is for that.

Exit code 0: nothing bad; 1: something bad.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from trainer import train_for_ever
from victim import Tally, keep, run_storm

import tierload

LIMIT_S = 120  # no run takes so long to say or do anything
WAYS = ("SIGKILL", "SIGTERM", "two SIGTERM", "SIGSTOP, SIGCONT, SIGKILL")


class Trainer:
    """A run in a forked process, since to start Python and torch takes longer than all else; and what it has said."""

    def __init__(self, store: Path, seed: str) -> None:
        self.out, out = os.pipe()
        self.log, log = os.memfd_create("stderr"), sys.stderr.fileno()
        self.process = os.fork()
        if self.process == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.dup2(out, 1)
            os.dup2(self.log, log)
            try:
                train_for_ever(str(store), seed)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        os.close(out)
        self.heard = b""

    def hear(self, seconds: float, until: bytes = b"") -> bool:
        """Listens for so long, or until a word is there; false when the process has ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not (until and until in self.heard):
            if select.select([self.out], [], [], left)[0]:
                data = os.read(self.out, 1 << 16)
                if not data:
                    return False
                self.heard += data
        return True

    def end(self, way: str, chance: random.Random) -> int:
        """Ends it; its status, or 124 when it hangs."""
        if way == "SIGTERM":
            self.send(signal.SIGTERM)
        elif way == "two SIGTERM":
            self.send(signal.SIGTERM)
            self.hear(chance.uniform(0, 0.01))
            self.send(signal.SIGTERM)
        else:
            for number in (signal.SIGSTOP, signal.SIGCONT) if "STOP" in way else ():
                self.send(number)
                self.hear(chance.uniform(0, 0.02))
            self.send(signal.SIGKILL)
        hangs = self.hear(LIMIT_S)
        if hangs:
            self.send(signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        os.close(self.out)
        return 124 if hangs else os.waitstatus_to_exitcode(status)

    def send(self, number: int) -> None:
        """It may have ended: nobody has waited for it yet, so the number is still its own."""
        os.kill(self.process, number)

    def complaints(self) -> str:
        """What it wrote to stderr."""
        with os.fdopen(self.log, "rb") as file:
            file.seek(0)
            return file.read().decode(errors="replace")

    def acknowledged(self) -> list[tuple[int, str]]:
        """Steps and ids of the commits that it said were durable; an unfinished line is not said."""
        lines = [line.split() for line in self.heard.decode().split("\n")[:-1]]
        return [(int(words[1]), words[2]) for words in lines if words[0] == "durable"]


def wrong_after(store: Path, newest: tuple[int, str] | None) -> str:
    """What is wrong with a store, or nothing."""
    try:
        with tierload.Store(store) as reader:
            commits = reader.commits()
            if newest is not None and newest[1] not in {commit.id for commit in commits}:
                return f"step {newest[0]} was acknowledged and is gone; there are {[c.step for c in commits]}"
            head = reader.head()
            if newest is not None and (head is None or (head.step or 0) < newest[0]):
                return f"step {newest[0]} was acknowledged, and the head is {head}"
            for commit in commits:
                state = reader.load(commit=commit)
                weight, twice = state["weight"], state["twice"]  # type: ignore[index]
                if not (weight == commit.step).all() or not (twice == 2 * (commit.step or 0)).all():
                    return f"commit {commit.id} of step {commit.step} is not of one moment: {weight.unique()}"
            report = reader.verify(full=True)
            return "" if report.ok else f"verify: {report.damages}"
    except tierload.TierloadError as error:
        return f"{type(error).__name__}: {error}"


def storm(directory: Path, points: int, seconds: float, seed: int) -> Tally:
    """So many ends of one run, or as many as there is time for."""
    tally = Tally("signals to a trainer that saves in the background")
    store = directory / "store"
    chance = random.Random(seed)
    newest: tuple[int, str] | None = None
    steps = saves = 0
    ends: Counter[str] = Counter()
    end = time.monotonic() + seconds
    for point in range(points):
        if time.monotonic() > end:
            break
        way = WAYS[point % len(WAYS)]
        trainer = Trainer(store, f"{seed}-{point}")
        if not trainer.hear(LIMIT_S, b"\n"):
            trainer.end("SIGKILL", chance)
            tally.failure(f"seed {seed}, point {point}: it does not start: {trainer.complaints()}", "start")
            break
        trainer.hear(chance.uniform(0, 0.4))
        code = trainer.end(way, chance)
        told = trainer.complaints()
        tally.points += 1
        ends[way] += 1
        done = trainer.acknowledged()
        saves += len(done)
        newest = done[-1] if done else newest
        steps = max([steps, *(step for step, _ in done)])
        wrong = wrong_after(store, newest)
        if code not in (-signal.SIGKILL, -signal.SIGTERM):
            wrong = f"{way}: it ends with {code}: {told}" + (f"; {wrong}" if wrong else "")
        if wrong and tally.failure(f"seed {seed}, point {point}, {way}: {wrong}", way):
            print(f"    {keep(store, directory / 'log', f'storm-{seed}-{point}')}")
    tally.note = f"{saves} saves acknowledged, {steps} steps, " + ", ".join(f"{n} {way}" for way, n in ends.items())
    return tally


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    sys.exit(run_storm(__doc__, 300, storm))
