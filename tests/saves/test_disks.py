"""Saves in the background whose disk fills up, whose process is killed, or beside which other processes go
on: B09, B10, B21 and B36."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.cases.children import killed
from tests.cases.stores import SMALL, assert_is, let_go, state_of, unreferenced
from tests.cases.test_disk_full import mounted_small
from tests.saves.failing import LONG_S, capped, child_ends, noise, until_writing
from tests.store.support import Outcome, in_child
from tierload import Settings, Store, StoreIOError


def in_namespace(body: Callable[[], Any]) -> Any:
    """What ``body`` gives, in a child that may mount what it likes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    outcome: Outcome = in_child(body, seconds=100)
    if outcome.error in ("PermissionError", "CalledProcessError"):
        pytest.skip(f"cannot mount a tmpfs here: {outcome.message}")
    assert not outcome.signal
    assert not outcome.error, outcome.trace
    return outcome.value


@pytest.mark.parametrize("how", ["handle", "next call", "retry"])
def test_b10_the_disk_fills_up(tmp_path: Path, how: str) -> None:
    """Training hears of it; when there is room again, the same calls work, and so does what was there before."""

    def body() -> tuple[str, int]:
        mounted_small(tmp_path, 40)
        path, filler = tmp_path / "store", tmp_path / "filler"
        tierload.save(state_of(1), path, step=1, settings=Settings(on_failure="retry" if how == "retry" else "raise"))
        filler.write_bytes(bytes(20 << 20))
        pending = tierload.async_save(noise(2, 30 << 10), path, step=2)
        if how == "retry":
            while pending.progress.phase != "waiting to try again":
                assert not pending.done()
            filler.unlink()
            assert pending.durable().step == 2
            text, number = "No space left", errno.ENOSPC
        else:
            try:
                if how == "next call":
                    while not pending.done():
                        pass
                    tierload.async_save(state_of(3), path, step=3)
                else:
                    pending.result()
            except StoreIOError as error:
                text, number = str(error), int(error.errno or 0)
            else:
                raise AssertionError("nobody was told")
            assert_is(tierload.load(path), 1)
            filler.unlink()
        assert tierload.async_save(state_of(4), path, step=4).durable().step == 4
        let_go(tmp_path)
        with Store(path) as store:
            assert store.verify(full=True).ok
            assert [commit.step for commit in store.commits()] == ([4, 2, 1] if how == "retry" else [4, 1])
        assert not unreferenced(path)
        return text, number

    text, number = in_namespace(body)
    assert number == errno.ENOSPC
    assert "No space left" in text


def test_b09_killed_while_the_older_one_is_collected(store: Path) -> None:
    """With keep=1 there is always one that can be loaded, bit for bit."""
    chance = random.Random(9)
    settings = capped(1.0, compression="off")
    tierload.save(state_of(0), store, step=0, settings=settings)
    let_go(store)
    for _ in range(25):
        before = tierload.load(store)["number"]

        def body(say: Any, first: int = before + 1) -> None:
            held = tierload.open(store, mode="w", settings=settings)
            for number in range(first, first + 1000):
                pending = held.async_save(state_of(number), step=number)
                held.collect(keep=1)
                say(f"begun {number}")
                pending.result()
                say(f"durable {number}")

        words = [word.split() for word in killed(body, chance.uniform(0.05, 0.4))]
        durable = max([before, *(int(number) for word, number in words if word == "durable")])
        found = tierload.load(store)["number"]
        assert found in (durable, durable + 1)
        assert_is(tierload.load(store), found)
        with Store(store) as reader:
            assert 1 <= len(reader.commits()) <= 2
    with Store(store, mode="w") as held:
        assert held.verify(full=True).ok
        held.collect()
    assert not unreferenced(store)


def test_b21_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    """After a kill in the midst of a save; and 64 MiB of /dev/shm do not bound what can be saved."""

    def body() -> list[str]:
        before = set(os.listdir("/dev/shm"))
        ctypes.CDLL(None).unshare(0x20000)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", "/dev/shm"], check=True, capture_output=True)
        path = tmp_path / "store"
        child = os.fork()
        if child == 0:
            pending = tierload.async_save(noise(1, 100 << 10), path, step=1)
            pending.result()
            held = tierload.open(path, mode="w", settings=Settings(bandwidth_cap_mbps=1))
            pending = held.async_save(noise(2, 100 << 10), step=2)
            until_writing(pending)
            os.kill(os.getpid(), signal.SIGKILL)
        assert child_ends(child) == -signal.SIGKILL
        assert tierload.load(path)["number"] == 1
        assert before is not None
        return os.listdir("/dev/shm")

    assert in_namespace(body) == []


def ranks(store: Path, rank: int, folder: Path) -> None:
    group = torch.distributed
    group.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=3)
    )
    pending = None
    if rank == 0:
        slow = replace(SMALL, bandwidth_cap_mbps=0.05, ranks="one")
        pending = tierload.async_save(noise(1, 320), store, step=1, settings=slow)
    going = torch.ones(1)
    turns = 0
    while going.item() > 0:  # until rank 0 has what it saves, which takes longer than the group waits
        time.sleep(0.01)
        going = torch.tensor([float(pending is not None and not pending.done())])
        group.all_reduce(going)
        turns += 1
    assert turns > 3
    if pending is not None:
        assert pending.durable().step == 1
    group.destroy_process_group()


def test_b36_collectives_go_on_beside_a_long_save(store: Path, tmp_path: Path) -> None:
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(LONG_S)
            try:
                torch.set_num_threads(1)
                ranks(store, rank, tmp_path)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [child_ends(child) for child in children] == [0, 0]
    assert tierload.load(store)["number"] == 1
