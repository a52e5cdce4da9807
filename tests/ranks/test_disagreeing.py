"""Ranks that do not save the same thing are told all that differs, and nothing is written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.ranks.jobs import Replicate, Shard, spread, whole
from tests.ranks.world import results

SETTINGS = tierload.Settings(rank_timeout_seconds=20)


def message(rank: int, ranks: int, make: str, path: str) -> tuple[str, str]:
    """What a save of a state that this rank makes raises: the kind of error, and what it says."""
    state, options = STATES[make](rank)
    settings = SETTINGS
    if "settings" in options:
        settings = options.pop("settings")
    try:
        tierload.save(state, path, settings=settings, **options)
    except tierload.TierloadError as error:
        return type(error).__name__, str(error)
    return "", ""


_WHO = re.compile(r"^rank \d+ \(.*?\): |\nlater, on rank .*", re.DOTALL)


def plain(rank: int, shape: tuple[int, ...] = (3,)) -> dict[str, Any]:
    return {"w": torch.ones(shape), "epoch": 1}


def of_other_bytes(rank: int) -> dict[str, Any]:
    copies = spread(whole((6, 2)), (2, 2), [Replicate(), Shard(0)])
    if rank == 3:
        copies.to_local()[1, 1] += 1
    return {"model": {"w": copies, "b": spread(whole((4,)), (2, 2), [Replicate(), Replicate()])}}


STATES: dict[str, Any] = {
    "steps": lambda rank: (plain(rank), {"step": 7 + rank // 3}),
    "keys": lambda rank: (plain(rank) | ({"x": torch.ones(1)} if rank == 2 else {"y": torch.ones(1)}), {}),
    "shapes": lambda rank: (plain(rank, (3,) if rank else (4,)), {}),
    "dtypes": lambda rank: ({"w": torch.ones(3, dtype=torch.int8 if rank == 1 else torch.uint8)}, {}),
    "placements": lambda rank: ({"w": spread(whole((8, 8)), (4,), [Shard(rank // 3)])}, {}),
    "replicas": lambda rank: (of_other_bytes(rank), {}),
    "declared": lambda rank: (
        {"w": torch.full((3,), float(rank)), "v": torch.ones(1)},
        {"settings": tierload.Settings(replicated=("w",), rank_timeout_seconds=20)},
    ),
    "settings": lambda rank: (plain(rank), {"settings": tierload.Settings(page_bytes=1 << 20 + rank)}),
    "unsupported": lambda rank: ({"w": torch.ones(1), "odd": object() if rank == 1 else 1}, {}),
    "partial": lambda rank: ({"w": summand()}, {}),
    "fine": lambda rank: (plain(rank), {"step": 1}),
}


def summand() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (4,)), [Partial()], run_check=False)


EXPECTED = {
    "steps": ("RanksDisagree", ["rank 3 saves with step 8, and rank 0 with 7"]),
    "keys": ("RanksDisagree", ["rank 2 lacks 'y', which rank 0 has", "rank 2 has 'x', which rank 0 lacks"]),
    "shapes": ("RanksDisagree", ["'w' is", "shape (3,) on rank 1", "on rank 2", "on rank 3", "shape (4,) on rank 0"]),
    "dtypes": ("RanksDisagree", ["'w' is", "on rank 1"]),
    "placements": ("RanksDisagree", ["'w' is", "on rank 3", "(1,)", "(0,)"]),
    "replicas": ("RanksDisagree", ["'model/w' on rank 3 is not what its replica on rank 1 is"]),
    "declared": ("RanksDisagree", ["'w' differs between ranks"]),
    "settings": ("RanksDisagree", ["rank 1 saves with settings", "rank 3 saves with settings"]),
    "unsupported": ("UnsupportedValue", ["state['odd']"]),
    "partial": ("UnsupportedValue", ["state['w']", "summands", "redistribute"]),
}


def all_of_them(rank: int, ranks: int, folder: str) -> dict[str, tuple[str, str]]:
    said = {}
    for make in EXPECTED:
        said[make] = message(rank, ranks, make, f"{folder}/{make}")
        again = message(rank, ranks, make, f"{folder}/{make}")
        first, second = (_WHO.sub("", text) for _, text in (said[make], again))
        assert first == second, "and the next call is refused in the same way, whoever comes first"
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[str, str]]]]:
    folder = tmp_path_factory.mktemp("stores")
    return folder, results(4, all_of_them, str(folder), limit=120)


@pytest.mark.parametrize("what", EXPECTED)
def test_all_ranks_raise_the_same_and_nothing_is_written(
    said: tuple[Path, list[dict[str, tuple[str, str]]]], what: str
) -> None:
    folder, ranks = said
    kind, parts = EXPECTED[what]
    for rank, heard in enumerate(ranks):
        found, text = heard[what]
        assert found == kind, (rank, text)
        assert all(part in text for part in parts), (rank, text)
    assert list((folder / what / "man").iterdir()) == []
    assert list((folder / what / "seg").iterdir()) == []


def in_two_places(rank: int, ranks: int, folder: str) -> list[tuple[str, str]]:
    os.chdir(folder)
    said = []
    # B31: a path that holds a time.
    said.append(message(rank, ranks, "steps", f"{folder}/run-12:00:0{rank}"))
    # B30: the same name, which is another directory on each node.
    os.makedirs(f"{folder}/node{rank}/run", exist_ok=True)
    local = f"{folder}/here{rank}"
    os.symlink(f"{folder}/node{rank}", local)
    said.append(message(rank, ranks, "fine", f"{local}/run"))
    # Relative, absolute, and by a link: one directory.
    names = [f"{folder}/shared", "shared", f"{folder}/link", f"{folder}/./shared"]
    if rank == 0:
        os.makedirs(f"{folder}/shared")
        os.symlink(f"{folder}/shared", f"{folder}/link")
    torch.distributed.barrier()
    said.append(message(rank, ranks, "fine", names[rank]))
    return said


def test_paths_are_compared_by_where_they_lead(tmp_path: Path) -> None:
    for dated, local, shared in results(4, in_two_places, str(tmp_path)):
        assert dated[0] == local[0] == "RanksDisagree"
        assert "12:00:01" in dated[1]
        assert "12:00:03" in dated[1]
        assert shared == ("", "")
    assert not list(tmp_path.glob("run-*/man/*"))
    with tierload.open(tmp_path / "shared") as store:
        assert [commit.ranks for commit in store.commits()] == [4]
