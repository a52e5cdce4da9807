"""The rescue reader against what several ranks have written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.plan.plan_layouts import layouts, shapes
from tests.ranks.jobs import whole
from tests.ranks.looked import (
    FIRST,
    MORE_RANKS,
    OTHER_CUT,
    RANKS,
    SHARED_CHANGED,
    looked_at,
    shard,
)
from tests.rescue.builder import NUMBERS, Builder, Chunk, array, tensor
from tests.rescue.opinion import check_layout
from tests.rescue.support import flip, numpy_of
from tierload import rescue
from tierload.plan import local_boxes, replica
from tierload.rescue.__main__ import main
from tierload.rescue.meshes import spread_boxes
from tierload.types import Layout


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(looked_at(), tmp_path / "store"))


def expected(step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a commit, as rescue names it."""
    bulk = whole((40, 100), 3)
    if step >= SHARED_CHANGED:
        bulk[39, 99] = -1
    ranks = 3 if step == MORE_RANKS else RANKS
    own = {f"~own/{rank}/mine": torch.full((4,), float(rank)) for rank in range(ranks)}
    same, small = whole((7,), 1), whole((5, 3), 2)
    return {"w": whole((24, 60)), "same": same, "bulk": bulk, "small": small, "empty": torch.empty(0, 4)} | own


def check(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, expected_tensor in wanted.items():
        assert np.array_equal(numpy_of(found[key]), expected_tensor.numpy()), key
        assert found[key][1] == tuple(expected_tensor.shape)


def test_tensors_are_whole_and_own_ones_are_there_for_each_rank(store: Path) -> None:
    for step in range(FIRST, MORE_RANKS + 1):
        check(rescue.read(store, step=step), expected(step))
    assert [commit.ranks for commit in rescue.commits(store)] == [2, 2, 2, 2, 3]


def test_every_byte_is_what_the_format_says(store: Path) -> None:
    check_layout(store)


def test_the_file_that_is_written_has_the_documents_of_all_ranks(store: Path, tmp_path: Path) -> None:
    assert main([str(store), "--step", "1", "--to", str(tmp_path / "out.safetensors")]) == 0
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        texts = file.metadata()
        assert set(file.keys()) == expected(FIRST).keys()
        assert np.array_equal(file.get_tensor("w"), whole((24, 60)).numpy())
    own = [json.loads(texts[name])["own"][1]["d"] for name in ("tierload.state", "tierload.state.1")]
    assert own == [{"position": 0}, {"position": 100}]


def test_without_a_rank_the_other_tensors_are_there(store: Path) -> None:
    for suffix in ("", ".m"):
        flip(Path(f"{shard(store, SHARED_CHANGED, 1)}{suffix}"), 300)
    report = rescue.Report()
    found = rescue.read(store, step=SHARED_CHANGED, report=report)
    assert found.keys() == expected(SHARED_CHANGED).keys() - {"w", "bulk", "same", "~own/1/mine"}
    assert any("rank 1: man/" in line for line in report.problems)
    for key in ("w", "bulk", "same"):  # rank 1 has written the copy of `same`
        assert any(f"key '{key}': the shard of rank 1" in line for line in report.problems)
    with pytest.raises(rescue.Damage):
        rescue.read(store, step=SHARED_CHANGED)


def test_the_newest_whole_commit_is_taken(store: Path) -> None:
    for file in (store / "man").glob("*-000000000005.r0002*"):
        file.unlink()
    for file in (store / "man").glob("*-000000000004.root*"):
        file.unlink()
    report = rescue.Report()
    check(rescue.read(store, report=report), expected(OTHER_CUT))
    assert len(report.problems) == 2


def test_one_copy_serves(store: Path) -> None:
    for file in (store / "man").iterdir():
        if file.suffix != ".m":
            flip(file, 100)
    report = rescue.Report()
    check(rescue.read(store, report=report), expected(MORE_RANKS))
    assert report.problems == []
    assert sum("one of the copies is damaged" in note for note in report.notes) == 4


def test_a_shard_of_another_commit_is_refused(store: Path) -> None:
    for suffix in ("", ".m"):
        shutil.copyfile(f"{shard(store, 2, 1)}{suffix}", f"{shard(store, 4, 1)}{suffix}")
    report = rescue.Report()
    rescue.read(store, step=SHARED_CHANGED, report=report)
    assert any("rank 1: " in line for line in report.problems)
    check(rescue.read(store, step=OTHER_CUT), expected(OTHER_CUT))


# -- stores that are written by hand

GRID = np.arange(7 * 4, dtype=np.float32).reshape(7, 4)
NOTHING: dict[str, Any] = {"own": [], "own_tensors": []}


def piece(key: str, whole: np.ndarray[Any, Any], *where: slice) -> Chunk:
    """A part of a tensor as a chunk."""
    offsets = tuple(one.start or 0 for one in where)
    return array(np.ascontiguousarray(whole[where]), part=(key, whole.shape, offsets))


def split(shards: list[dict[str, Chunk]], parts: Any, mesh: Any = None, placements: Any = None) -> list[Any]:
    """The shards of a commit whose state is GRID."""
    row = ["g", NUMBERS["float32"], [7, 4], parts, None if mesh is None else 0, placements]
    root = {"d": {"g": tensor("g", [7, 4])}}
    root["d"]["g"]["t"]["chunk"] = 0
    shared = {"ranks": len(shards), "root": root, "meshes": [mesh] if mesh else [], "tensors": [row]}
    return [(chunks, NOTHING | (shared if rank == 0 else {})) for rank, chunks in enumerate(shards)]


def by_hand(store: Path, *shards: Any, **more: Any) -> Path:
    builder = Builder(store)
    builder.super(3, (1, 0), features=1)
    builder.commit_ranks(*shards, **more)
    return store


def test_rows_of_ranks(tmp_path: Path) -> None:
    cut = [{"p": piece("g", GRID, slice(0, 3), slice(0, 4))}, {}, {"p": piece("g", GRID, slice(3, 7), slice(0, 4))}]
    path = by_hand(tmp_path / "made", *split(cut, [[0, 3, 0], [3, 7, 2]]))
    assert np.array_equal(numpy_of(rescue.read(path)["g"]), GRID)


def test_a_mesh_whose_ranks_stand_in_another_order_and_a_split_dimension(tmp_path: Path) -> None:
    """Rows go to ranks 2 and 0 in two halves each, which have copies on 3 and 1."""
    mesh = [[2, 2], [2, 3, 0, 1], ["rows", "copies"]]
    held: list[dict[str, Chunk]] = [{}, {}, {}, {}]
    for rank, rows in ((2, [(0, 2), (4, 6)]), (0, [(2, 4), (6, 7)])):
        held[rank + 1] = {f"{n}": piece("g", GRID, slice(*span), slice(0, 4)) for n, span in enumerate(rows)}
    path = by_hand(tmp_path / "made", *split(held, [[0, -1, 1]], mesh, [[0, 2], None]))
    assert np.array_equal(numpy_of(rescue.read(path)["g"]), GRID)


def test_own_values_refer_to_their_own_tensors(tmp_path: Path) -> None:
    ones = {rank: np.full(3, rank, np.int64) for rank in range(2)}
    row = ["mine/x", NUMBERS["int64"], [3]]
    own = {"own": [{"d": {"x": {"t": {"chunk": 0, "shape": [3]}}}}, 5], "own_tensors": [row]}
    shared = {"ranks": 2, "root": {"d": {"mine": {"own": 0}, "n": {"own": 1}}}, "meshes": [], "tensors": []}
    shards = [({"mine/x": array(ones[rank])}, own | (shared if rank == 0 else {})) for rank in range(2)]
    found = rescue.read(by_hand(tmp_path / "made", *shards))
    assert {key: numpy_of(one).tolist() for key, one in found.items()} == {
        "~own/0/mine/x": [0, 0, 0],
        "~own/1/mine/x": [1, 1, 1],
    }


@pytest.mark.parametrize(
    ("parts", "second", "what"),
    [
        ([[0, 3, 0], [4, 7, 1]], (4, 7), "do not make up all of it"),
        ([[0, 3, 0], [2, 7, 1]], (2, 7), "overlaps"),
        ([[0, 3, 0], [3, 7, 1]], (4, 7), "has no part of it"),
        ([[0, 3, 0], [3, 7, 5]], (3, 7), "the shard of rank 5"),
    ],
)
def test_pieces_that_do_not_make_up_a_tensor(tmp_path: Path, parts: Any, second: tuple[int, int], what: str) -> None:
    cut = [{"p": piece("g", GRID, slice(*rows), slice(0, 4))} for rows in ((0, 3), second)]
    report = rescue.Report()
    assert rescue.read(by_hand(tmp_path / "made", *split(cut, parts)), report=report) == {}
    assert len(report.problems) == 1
    assert what in report.problems[0]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [([[2], [0, 1, 1], []], [0]), ([[2], [0, 1], []], [0, None]), ([[2], [0, 1], []], [3]), ([[2], 7, []], [0])],
)
def test_a_damaged_layout(tmp_path: Path, mesh: Any, placements: Any) -> None:
    cut = [{"p": piece("g", GRID, slice(*rows), slice(0, 4))} for rows in ((0, 4), (4, 7))]
    report = rescue.Report()
    with pytest.raises(rescue.Damage, match="not readable"):
        rescue.read(by_hand(tmp_path / "made", *split(cut, [[0, -1, 0]], mesh, placements)), report=report)


def test_rows_of_a_root_that_are_in_another_order(tmp_path: Path) -> None:
    cut = [{"p": piece("g", GRID, slice(*rows), slice(0, 4))} for rows in ((0, 4), (4, 7))]
    path = by_hand(tmp_path / "made", *split(cut, [[0, 4, 0], [4, 7, 1]]), rows=list.reverse)
    with pytest.raises(rescue.Damage, match="its rows are not those of ranks 0 to 1"):
        rescue.read(path)


@given(st.data())
def test_boxes_are_those_of_the_planner(data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(lambda sizes: 0 not in sizes))
    layout: Layout = data.draw(layouts(len(shape)))
    placements = [list(one) if isinstance(one, tuple) else one for one in layout.placements]
    mesh = [list(layout.mesh.shape), list(layout.mesh.ranks), []]
    of_first = [rank for rank in layout.mesh.ranks if replica(layout, rank)[0] == 0]
    planned = {(rank, *local.box) for rank in of_first for local in local_boxes(shape, layout, rank)}
    assert {(rank, *box) for rank, box in spread_boxes(list(shape), mesh, placements, 0)} == planned
