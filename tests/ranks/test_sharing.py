"""Ranks of one node load together: each page is read once between them, and what goes wrong is known to all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierload
from tests.ranks.sharing import (
    COLUMNS,
    COPIES,
    EIGHT,
    GRID,
    ROWS,
    THREE,
    Layout,
    count_reads,
    few_at_a_time,
    local,
    opened,
    save,
    stored_bytes,
    target,
    values,
)
from tests.ranks.world import results, world
from tierload.engine import sharing
from tierload.errors import CorruptPage, KeyMismatch, RankLost, RanksDisagree

WAYS: dict[str, tuple[int, Layout, int, Layout]] = {
    "4 to 3": (4, ROWS, 3, THREE),
    "2x2 to 8": (4, GRID, 8, EIGHT),
    "rows to columns": (4, ROWS, 4, COLUMNS),
    "copies": (4, COPIES, 4, COPIES),
    "1 to 4": (1, ((1,), COPIES[1]), 4, ROWS),
}


def bits(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: local(tensor).contiguous().numpy().tobytes() for name, tensor in state.items()}


def loaded_both_ways(rank: int, ranks: int, path: str, layout: Layout, small: bool) -> tuple[int, int]:
    if small:
        few_at_a_time()
    counts = count_reads()
    shared, alone = target(layout), target(layout)
    with opened(path) as store:
        store.load(into=shared)
        read = counts.total()
        store.load(into=alone, together=False)
    assert bits(shared) == bits(alone)
    for name, right in values().items():
        full = shared[name].full_tensor() if hasattr(shared[name], "full_tensor") else shared[name]  # type: ignore[attr-defined]
        assert torch.equal(full, right)
    return read, counts.total() - read


@pytest.mark.parametrize("small", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at once", "in many waves"])
@pytest.mark.parametrize(
    "way", ["2x2 to 8", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "2x2 to 8")]
)
def test_every_rank_gets_what_it_gets_alone_and_each_page_is_read_once(tmp_path: Path, way: str, small: bool) -> None:
    before, stored, after, wanted = WAYS[way]
    path = str(tmp_path / "store")
    results(before, save, path, stored)
    read = results(after, loaded_both_ways, path, wanted, small)
    if before > 1 and not small:
        nbytes = stored_bytes(path)
        assert nbytes <= sum(shared for shared, _ in read) <= 1.05 * nbytes
        assert sum(alone for _, alone in read) > 1.2 * nbytes


def replicas_loaded(rank: int, ranks: int, path: str) -> int:
    counts = count_reads()
    model = {name: torch.zeros_like(one) for name, one in values().items()}
    with opened(path) as store:
        store.load(into=model, together=True)
    assert all(torch.equal(model[name], right) for name, right in values().items())
    return counts.total()


def test_replicas_without_a_spread_tensor_load_together_when_asked_to(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    results(4, save, path, COPIES)
    assert sum(results(4, replicas_loaded, path)) <= 1.05 * stored_bytes(path)


def not_mapped_by_one(rank: int, ranks: int, path: str) -> None:
    if rank == 1:
        sharing._Sharing._map = lambda self, path: b"no"  # type: ignore[method-assign]
    state = target(ROWS)
    with opened(path) as store:
        store.load(into=state)
    assert torch.equal(state["a"].full_tensor(), values()["a"])  # type: ignore[attr-defined]


def test_ranks_that_cannot_share_memory_read_by_themselves(tmp_path: Path) -> None:
    results(4, save, str(tmp_path / "store"), COLUMNS)
    results(4, not_mapped_by_one, str(tmp_path / "store"))


# ---- what goes wrong -----------------------------------------------------------------------------------------------
def damaged(rank: int, ranks: int, path: str) -> Any:
    few_at_a_time()
    state = target(ROWS)
    with opened(path) as store, pytest.raises(CorruptPage) as found:
        store.load(into=state)
    for name, tensor in state.items():
        assert name in found.value.overwritten or not local(tensor).any(), f"{name} was changed and is not listed"
    error = found.value
    return error.commit, error.key, error.page, error.path, error.offset, str(error)


def test_a_damaged_page_is_told_to_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "store"
    results(4, save, str(path), COLUMNS)
    segment = max((path / "seg").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    found = results(4, damaged, str(path))
    assert len({one[:5] for one in found}) == 1
    assert found[0][3] == f"seg/{segment.name}"
    assert sum(one[5].startswith("rank ") for one in found) == 3, "all but the reader name it"


def killed_in_a_wave(rank: int, ranks: int, path: str, victim: int) -> Any:
    few_at_a_time()
    read = sharing._Sharing._read_wave
    waves = []

    def dying(self: Any, *arguments: Any) -> None:
        waves.append(1)
        if rank == victim and len(waves) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        read(self, *arguments)

    sharing._Sharing._read_wave = dying  # type: ignore[method-assign]
    with opened(path) as store, pytest.raises(RankLost) as found:
        store.load(into=target(ROWS))
    return found.value.ranks


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_in_a_shared_load_is_lost_to_all(tmp_path: Path, victim: int) -> None:
    path = str(tmp_path / "store")
    results(4, save, path, COLUMNS)
    before = {name for name in os.listdir("/dev/shm") if not name.startswith("tierload-ranks-")}
    outcomes = world(4, killed_in_a_wave, path, victim, limit=30)
    assert outcomes[victim].status == -signal.SIGKILL
    assert [one.result for one in outcomes if one is not outcomes[victim]] == [(victim,)] * 3
    assert {name for name in os.listdir("/dev/shm") if "tierload-pages" in name} <= before


def one_target_differs(rank: int, ranks: int, path: str, again: bool) -> str:
    if again:  # who is on the node is known already
        with opened(path) as store:
            store.load(into=target(ROWS))
    state = target(ROWS)
    if rank == 2:
        state["plain"] = torch.zeros(3)
    with opened(path) as store:
        with pytest.raises(KeyMismatch) as found:
            store.load(into=state)
        state = target(ROWS)
        store.load(into=state)
    assert torch.equal(state["a"].full_tensor(), values()["a"])  # type: ignore[attr-defined]
    return str(found.value)


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True], ids=["first", "again"])
def test_a_target_that_does_not_fit_on_one_rank_is_told_to_all_and_the_next_load_works(
    tmp_path: Path, again: bool
) -> None:
    path = str(tmp_path / "store")
    results(4, save, path, COLUMNS)
    texts = results(4, one_target_differs, path, again)
    assert all("plain" in text for text in texts)
    assert ["rank 2 (" in text for text in texts] == [True, True, False, True]


def different_commits(rank: int, ranks: int, path: str) -> str:
    with opened(path) as store, pytest.raises(RanksDisagree) as found:
        store.load(into=target(ROWS), commit=store.commits()[1 if rank == 3 else 0])
    return str(found.value)


def saved_twice(rank: int, ranks: int, path: str) -> None:
    for _ in range(2):
        save(rank, ranks, path, ROWS)


@pytest.mark.slow
def test_ranks_that_load_different_commits_are_told(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    results(4, saved_twice, path)
    assert all("rank 3 loads" in text for text in results(4, different_commits, path))


def one_stays_away(rank: int, ranks: int, path: str) -> Any:
    dist.barrier()
    if rank == 3:
        time.sleep(9)
        return None
    with opened(path, limit=4.0) as store, pytest.raises(RankLost) as found:
        store.load(into=target(ROWS))
    return found.value.ranks, str(found.value)


@pytest.mark.slow
def test_a_rank_that_does_not_load_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    results(4, save, path, ROWS)
    for ranks, text in results(4, one_stays_away, path)[:3]:
        assert ranks == (3,)
        assert "has not called load" in text
        assert "together=False" in text


def some_load(rank: int, ranks: int, path: str) -> None:
    if rank in (1, 2):
        state = {name: torch.zeros_like(one) for name, one in values().items()}
        with opened(path, limit=1.0) as store:
            store.load(into=state)
            assert torch.equal(store.load()["a"], values()["a"])  # type: ignore[index]
        assert torch.equal(state["a"], values()["a"])
    dist.barrier()
    if rank == 0:
        state = target(ROWS)
        tierload.load(path, into=state, together=False)
        assert torch.equal(local(state["d"]), values()["d"][: len(local(state["d"]))])


def test_without_spread_tensors_or_when_told_so_nobody_waits(tmp_path: Path) -> None:
    results(4, save, str(tmp_path / "store"), ROWS)
    results(4, some_load, str(tmp_path / "store"))
