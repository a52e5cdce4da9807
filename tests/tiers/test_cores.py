"""Cores of workers: beside the training's where there are some, and a thread is really put there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from tierload.tiers.cores import WorkerCores, numa_nodes, worker_cores

TWO = {0: frozenset({0, 1, 2, 6}), 1: frozenset({3, 4, 5, 7})}


def machine(monkeypatch: pytest.MonkeyPatch, allowed: set[int], threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


def test_workers_get_the_cores_that_the_training_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, set(range(8)), 2)
    found = worker_cores(TWO)
    assert found == WorkerCores((2, 6, 3, 4, 5, 7), 6, False, 0)  # of the training's node first
    assert str(found) == "6 workers have cores 2-7 to themselves"
    machine(monkeypatch, {4, 5, 7}, 2)
    assert worker_cores(TWO) == WorkerCores((7,), 1, False, 1)  # a cpuset
    assert worker_cores({}) == WorkerCores((7,), 1, False, None)
    assert worker_cores({0: frozenset(range(8))}).node is None
    machine(monkeypatch, set(range(128)), 64)
    assert worker_cores({}).count == 16


def test_workers_share_where_the_training_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {0, 1, 3}, 8)
    found = worker_cores(TWO)
    assert found == WorkerCores((0, 1, 3), 3, True, None)  # on both nodes
    assert str(found) == "3 workers share cores 0-1,3 with the training, at a lower priority"


@pytest.mark.parametrize("shared", [False, True])
def test_a_thread_is_put_there_and_the_others_stay(shared: bool) -> None:
    allowed, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    core = max(allowed)
    found: list[object] = []

    def work() -> None:
        found.append(WorkerCores((core,), 1, shared, None).settle())
        found.append(os.sched_getaffinity(0))
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None, {core}, 3 if shared else nice]
    assert os.sched_getaffinity(0) == allowed
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == nice


def test_cores_that_are_gone_are_no_failure() -> None:
    assert "could not be put on cores 4095: Invalid argument" in str(WorkerCores((4095,), 1, False, None).settle())


def test_nodes_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    for node, text in {"node0": "0-1,4\n", "node10": "2\n", "node2": "\n", "node3": None}.items():
        (tmp_path / node).mkdir()
        if text is not None:
            (tmp_path / node / "cpulist").write_text(text)
    (tmp_path / "online").write_text("0-3\n")
    assert numa_nodes(tmp_path) == {0: frozenset({0, 1, 4}), 10: frozenset({2})}
    assert numa_nodes(tmp_path / "absent") == {}
