"""Shards that are each as they were written, and yet do not fit together, as no release writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierload
from tests.store.support import native
from tests.store.test_many_ranks import write_page
from tierload import _native
from tierload.engine.inventory import grid_fault
from tierload.errors import CorruptStore
from tierload.layout.rows import CHUNK_ROW
from tierload.types import Box

ROWS = 8192
Span = tuple[int, int]  # rows from and to of a tensor of 2 * ROWS bytes


def write(save: _native.Save, span: Span, document: dict[str, Any]) -> None:
    """A shard with one piece."""
    begin, end = span
    data = np.arange(begin, end).astype(np.uint8)
    write_page(save, data)
    row = np.zeros(1, CHUNK_ROW)
    row["key_hash"] = _native.key_hashes(keys=b"w", lengths=np.ones(1, np.int64))
    row["key_length"], row["dtype"], row["ndim"], row["bytes"], row["pages"] = 1, 2, 1, data.nbytes, 1
    dims = np.array([2 * ROWS, begin, end - begin], np.int64).view(np.uint8)
    text = json.dumps({"version": 1} | document).encode()
    save.write_manifest(page_bytes=1 << 20, chunks=row.view(np.uint8), dims=dims, keys=b"w", state=text)


def shared(parts: list[list[int]], own: int = 0) -> dict[str, Any]:
    tensor = {"t": {"chunk": 0, "shape": [2 * ROWS]}}
    more = {f"own{n}": {"own": n} for n in range(own)}
    return {
        "ranks": 2,
        "root": {"d": {"w": tensor, **more}},
        "meshes": [],
        "tensors": [["w", 2, [2 * ROWS], parts, None, None]],
        "own": [7] * own,
        "own_tensors": [],
    }


NOTHING: dict[str, Any] = {"own": [], "own_tensors": []}
HALVES = [[0, ROWS, 0], [ROWS, 2 * ROWS, 1]]


def commit(path: Path, first: dict[str, Any], second: dict[str, Any], spans: list[Span]) -> None:
    store, other = native(path, writable=True), None
    save = _native.Save(store, ranks=2)
    other = _native.Save.of_rank(native(path), epoch=save.epoch, txid=save.txid, rank=1, ranks=2)
    for each, span, document in zip((save, other), spans, (first, second), strict=True):
        write(each, span, document)
        each.flush()
    save.commit(step=1, meta=b"{}", tags=[], rows=save.row + other.row, raw_bytes=2 * ROWS)
    other.done()
    store.close()


def damages(path: Path) -> list[tuple[int, tuple[str, ...], str]]:
    with tierload.open(path) as store:
        report = store.verify()
        assert report.ok == (report.whole == report.read)
        return [(damage.rank, damage.keys, damage.message) for damage in report.damages]


def test_what_fits_together_is_whole(tmp_path: Path) -> None:
    commit(tmp_path / "store", shared(HALVES), NOTHING, [(0, ROWS), (ROWS, 2 * ROWS)])
    assert damages(tmp_path / "store") == []


def test_a_piece_of_another_box_is_missing_and_too_much(tmp_path: Path) -> None:
    commit(tmp_path / "store", shared(HALVES), NOTHING, [(0, ROWS), (ROWS + 4096, 2 * ROWS)])
    found = damages(tmp_path / "store")
    assert [(rank, keys) for rank, keys, _ in found] == [(1, ("w",))] * 2
    assert f"no part of 'w' at ({ROWS},) of sizes ({ROWS},)" in found[0][2]
    assert "of no tensor of this state" in found[1][2]
    what = "shard of rank 1 has no part of 'w'"
    with tierload.open(tmp_path / "store") as store, pytest.raises(CorruptStore, match=what):
        store.load()


def test_a_piece_of_another_dtype(tmp_path: Path) -> None:
    first = shared(HALVES)
    first["tensors"][0][1] = 3  # int8, where the chunks are uint8
    commit(tmp_path / "store", first, NOTHING, [(0, ROWS), (ROWS, 2 * ROWS)])
    found = damages(tmp_path / "store")
    assert sorted((rank, keys) for rank, keys, _ in found) == [(0, ("w",)), (0, ("w",)), (1, ("w",)), (1, ("w",))]


def test_parts_with_a_hole_or_an_overlap(tmp_path: Path) -> None:
    hole = shared([[0, 4096, 0], [ROWS, 2 * ROWS, 1]])
    commit(tmp_path / "store", hole, NOTHING, [(0, 4096), (ROWS, 2 * ROWS)])
    [(rank, keys, message)] = damages(tmp_path / "store")
    assert (rank, keys) == (-1, ("w",))
    assert f"a hole at {ROWS} of dimension 0" in message


def test_own_values_without_a_place(tmp_path: Path) -> None:
    commit(tmp_path / "store", shared(HALVES, own=1), NOTHING, [(0, ROWS), (ROWS, 2 * ROWS)])
    [(rank, _, message)] = damages(tmp_path / "store")
    assert rank == 1
    assert "rank 1 has 0 values of its own, and the state places for 1" in message


def test_a_version_vector_that_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    spans = [(0, ROWS), (ROWS, 2 * ROWS)]
    commit(path, shared(HALVES), NOTHING, spans)
    commit(path, shared(HALVES), NOTHING | {"more": 1}, spans)
    store = native(path, writable=True)
    rows = [store.root(txid) for txid in (1, 2)]
    save = _native.Save(store, ranks=2)
    other = _native.Save.of_rank(native(path), epoch=save.epoch, txid=save.txid, rank=1, ranks=2)
    save.refer(rows[1][:64])
    other.refer(rows[0][64:])
    for each in (save, other):
        each.flush()
    save.commit(step=3, meta=b"{}", tags=[], rows=save.row + other.row, raw_bytes=2 * ROWS)
    other.done()
    store.close()
    [(rank, _, message)] = damages(path)
    assert rank == 1
    assert "the shard of rank 1 is of transaction 1, and of 2 in" in message
    assert "the version vector goes back" in message


@pytest.mark.parametrize(
    ("fault", "boxes"),
    [
        ("", [((0, 0), (2, 3)), ((0, 3), (2, 2)), ((2, 0), (4, 3)), ((2, 3), (4, 2))]),
        ("1 of 4 parts are missing", [((0, 0), (2, 3)), ((0, 3), (2, 2)), ((2, 0), (4, 3))]),
        ("a hole at 3 of dimension 1", [((0, 0), (6, 2)), ((0, 3), (6, 2))]),
        ("an overlap at 3 of dimension 1", [((0, 0), (6, 4)), ((0, 3), (6, 2))]),
        ("a hole at its beginning", [((1, 0), (5, 5))]),
        ("a part that is there twice", [((0, 0), (6, 5)), ((0, 0), (6, 5))]),
        ("a hole at 5 of dimension 1", [((0, 0), (6, 4))]),
    ],
)
def test_grids_of_boxes(fault: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    assert grid_fault((6, 5), [Box(*box) for box in boxes]) == fault


def test_grids_without_elements_or_dimensions() -> None:
    assert grid_fault((0, 3), []) == ""
    assert grid_fault((), [Box((), ())]) == ""
    assert grid_fault((), []) == grid_fault((2,), []) == "there are 0 parts"
