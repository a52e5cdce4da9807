"""What several ranks have saved, looked at by one process: keys, sizes, differences, and damage that is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import tierload
from tests.cli.support import flip
from tests.ranks.looked import (
    FIRST,
    MORE_RANKS,
    OTHER_CUT,
    OWN_CHANGED,
    SHARED_CHANGED,
    looked_at,
    shard,
)
from tierload.engine import boxes
from tierload.errors import CorruptStore, KeyMismatch


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(looked_at(), tmp_path / "store"))


def test_keys_are_whole_tensors_and_own_ones_once_a_rank(store: Path) -> None:
    with tierload.open(store) as opened:
        found = [(info.key, info.shape, info.sizes, info.nbytes, info.rank) for info in opened.keys(MORE_RANKS)]
    whole = [("bulk", (40, 100)), ("empty", (0, 4)), ("same", (7,)), ("small", (5, 3)), ("w", (24, 60))]
    shared = [(key, shape, shape, torch.Size(shape).numel() * 4, None) for key, shape in whole]
    assert found == sorted([*shared, *(("mine", (4,), (4,), 16, rank) for rank in range(3))], key=lambda one: one[0])


def test_info_of_one_key_and_of_one_rank(store: Path) -> None:
    with tierload.open(store) as opened:
        by_key = {(info.key, info.rank): info for info in opened.keys(MORE_RANKS)}
        assert opened.info("w") == by_key["w", None]
        assert [opened.info("mine", rank=rank) for rank in range(3)] == [by_key["mine", rank] for rank in range(3)]
        assert opened.info("mine").rank == 0
        with pytest.raises(KeyMismatch, match="no tensor 'mime'"):
            opened.info("mime")


def test_shards_say_who_wrote_how_much_and_when_last(store: Path) -> None:
    with tierload.open(store) as opened:
        txids = {commit.step: commit.txid for commit in opened.commits()}
        vectors = {step: [one.txid for one in opened.shards(step)] for step in txids}
        assert vectors == {
            FIRST: [txids[FIRST]] * 2,
            OWN_CHANGED: [txids[FIRST], txids[OWN_CHANGED]],
            OTHER_CUT: [txids[OTHER_CUT]] * 2,
            SHARED_CHANGED: [txids[OTHER_CUT], txids[SHARED_CHANGED]],
            MORE_RANKS: [txids[MORE_RANKS]] * 3,
        }
        for commit in opened.commits():
            shards = opened.shards(commit)
            assert sum(one.raw_bytes for one in shards) == commit.raw_bytes
            assert [one.own_values for one in shards] == [2] * commit.ranks
            plan = opened.balance(commit)
            assert plan is not None
            assert plan.cuts == commit.ranks - 1
        head = opened.head()
        assert 0 < opened.stored_bytes() <= sum(one.stored_bytes for one in opened.shards(head))


def test_diff_is_by_value_whatever_the_cut_and_the_number_of_ranks(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "_ELEMENTS", 500)  # several slabs a piece
    with tierload.open(store) as opened:
        changed = {
            (a, b): opened.diff(a, b).changed
            for a, b in ((FIRST, OWN_CHANGED), (FIRST, OTHER_CUT), (OTHER_CUT, SHARED_CHANGED), (FIRST, MORE_RANKS))
        }
        back = opened.diff(MORE_RANKS, FIRST)
    assert changed == {
        (FIRST, OWN_CHANGED): (),  # `loader` is no tensor
        (FIRST, OTHER_CUT): (),
        (OTHER_CUT, SHARED_CHANGED): ("bulk",),
        (FIRST, MORE_RANKS): ("bulk", "mine"),
    }
    assert (back.added, back.removed, back.unchanged) == ((), (), 4)
    assert back.changed_bytes == 16_000 + 2 * 16


def test_diff_with_a_state_of_one_rank(store: Path) -> None:
    with tierload.open(store) as opened:
        state = opened.load()
    with tierload.open(store, mode="w") as opened:
        opened.save(state, step=6)
        assert opened.diff(MORE_RANKS, 6).changed == ("mine",)
        state["w"][23, 59] += 1  # type: ignore[index]
        opened.save(state | {"new": torch.zeros(2)}, step=7)  # type: ignore[operator]
        difference = opened.diff(MORE_RANKS, 7)
        assert (difference.changed, difference.added) == (("mine", "w"), ("new",))


def test_a_whole_store_verifies_and_shared_pages_are_read_once(store: Path) -> None:
    with tierload.open(store) as opened:
        report = opened.verify(full=True)
        stored = sum(file.stat().st_size for file in (store / "seg").iterdir())
    assert report.ok, report.damages
    assert 0 < report.bytes <= stored


def test_a_damaged_page_names_rank_and_key(store: Path) -> None:
    [segment] = [file for file in (store / "seg").iterdir() if ".r0001." in file.name and "-000000000001" in file.name]
    flip(segment, 1)
    with tierload.open(store) as opened:
        ids = {commit.step: commit.id for commit in opened.commits()}
        report = opened.verify(full=True)
    [damage] = report.damages
    assert damage.rank == 1
    assert set(damage.keys) <= {"bulk", "w", "mine"}
    assert damage.path == f"seg/{segment.name}"
    assert {ids[FIRST], ids[OWN_CHANGED]} <= set(damage.commits)
    assert f"rank 1: key {damage.keys[0]}" in damage.message
    assert not set(report.whole) & set(damage.commits)


def test_one_copy_of_a_shard_or_root_serves(store: Path) -> None:
    flip(shard(store, 1, 0), 300)
    root = shard(store, 1, 0).with_name("00000001-000000000001.root.m")
    flip(root, 70)
    with tierload.open(store) as opened:
        ids = {commit.step: commit.id for commit in opened.commits()}
        report = opened.verify(full=True)
    assert [(damage.path, damage.rank) for damage in report.damages] == [
        (f"man/{shard(store, 1, 0).name}", 0),
        (f"man/{root.name}", -1),
    ]
    assert set(report.damages[0].commits) == {ids[FIRST], ids[OWN_CHANGED]}  # the shard did not change between them
    assert len(report.whole) == 5


def test_a_lost_root_file_is_the_end_of_its_commit_only(store: Path) -> None:
    for copy in (store / "man").glob("*-000000000002.root*"):
        copy.unlink()
    with tierload.open(store) as opened:
        ids = {commit.step: commit.id for commit in opened.commits()}
        report = opened.verify(full=True)
    assert set(ids.values()) - set(report.whole) == {ids[OWN_CHANGED]}
    assert all(damage.commits == (ids[OWN_CHANGED],) for damage in report.damages)


def test_a_shard_of_another_commit_is_refused_by_rank_and_transaction(store: Path) -> None:
    """What a copy of a store has that was made while it was written to, or put together from two."""
    for suffix in ("", ".m"):
        new, old = (Path(f"{shard(store, txid, 1)}{suffix}") for txid in (4, 2))
        shutil.copyfile(old, new)
    what = r"rank 1 is of transaction 2 .*the commit's root says 4"
    with tierload.open(store) as opened:
        with pytest.raises(CorruptStore, match=what):
            opened.load(step=SHARED_CHANGED)
        report = opened.verify()
        ids = {commit.step: commit.id for commit in opened.commits()}
        assert opened.load(step=OTHER_CUT) is not None
    assert {damage.commits for damage in report.damages} == {(ids[SHARED_CHANGED],)}
    assert {damage.rank for damage in report.damages} == {1}
    for damage in report.damages:
        assert "rank 1 is of transaction 2" in damage.message
        assert "the commit's root says 4" in damage.message
