"""One save after the other by the ranks of a job: what is written again, what is not, and what rank 0 alone may do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierload
from tests.ranks.jobs import Replicate, Shard, spread, whole
from tests.ranks.world import results

SETTINGS = tierload.Settings(rank_timeout_seconds=20, compression="off")


def vector(path: str) -> list[int]:
    """The transactions that last changed each rank's shard."""
    with tierload.open(path) as store:
        head = store.head()
        assert head is not None
        rows = store._native.root(head.txid)
    return [int.from_bytes(rows[at + 16 : at + 24], "little") for at in range(0, len(rows), 64)]


def in_many_commits(rank: int, ranks: int, path: str) -> list[Any]:
    big = whole((64, 4096))  # 1 MiB, 16 rows a rank
    state: dict[str, Any] = {"w": spread(big, (4,), [Shard(0)]), "same": torch.ones(300_000), "own": torch.ones(4)}
    found = []

    def save() -> None:
        report = tierload.save(state, path, settings=SETTINGS)
        dist.barrier()
        found.append((report.commit.written_bytes, report.written_pages, vector(path)))
        dist.barrier()

    save()
    save()  # nothing has changed
    if rank == 2:
        state["w"].to_local()[0, 0] = -1
    save()  # on one rank
    state["own"] = torch.full((4,), float(rank))
    save()  # what was equal on all ranks is each rank's own now
    return found


def test_what_did_not_change_is_not_written_and_the_version_vector_says_who_changed(tmp_path: Path) -> None:
    ranks = results(4, in_many_commits, str(tmp_path / "store"))
    first, same, one, own = zip(*ranks, strict=True)
    assert all(row[2] == [1, 1, 1, 1] for row in first)
    assert all(row[0] == 0 and row[1] == 0 for row in same)
    assert all(row[2] == [1, 1, 1, 1] for row in same), "a shard that is the same is the old one"
    assert [row[1] for row in one] == [0, 0, 1, 0]
    assert all(row[2] == [1, 1, 3, 1] for row in one)
    assert all(row[2] == [4, 4, 4, 4] for row in own)


def balanced(rank: int, ranks: int, path: str) -> tuple[int, int]:
    state = {f"w{n}": torch.full((256, 1024), float(n)) for n in range(8)}  # 1 MiB each, on all ranks
    state |= {"small": torch.ones(10)}
    for number in range(8):
        state[f"w{number}"].copy_(whole((256, 1024), number))
    report = tierload.save(state, path, settings=SETTINGS)
    return report.commit.written_bytes, report.written_pages


def test_what_all_ranks_have_is_written_once_and_by_all_of_them(tmp_path: Path) -> None:
    rows = results(4, balanced, str(tmp_path / "store"))
    assert rows[0][0] < 8.1 * 2**20
    assert [pages for _, pages in rows] == [3, 2, 2, 2], "two MiB each, and rank 0 the small one"
    with tierload.open(tmp_path / "store") as store:
        found: Any = store.load()
    assert all(torch.equal(found[f"w{number}"], whole((256, 1024), number)) for number in range(8))


def own_values(rank: int, ranks: int) -> dict[str, Any]:
    return {"w": torch.full((2,), float(rank)), "rng": torch.Generator().manual_seed(rank), "loader": {"at": rank}}


def save_own(rank: int, ranks: int, path: str) -> None:
    tierload.save(own_values(rank, ranks), path, settings=SETTINGS)


def load_own(rank: int, ranks: int, path: str, records: bool) -> tuple[Any, ...]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierload").addHandler(handler)
    state: Any = tierload.load(path)
    right = torch.Generator().manual_seed(rank % 3).get_state()
    return state["w"].tolist(), torch.equal(state["rng"].get_state(), right), state["loader"], said


@pytest.mark.parametrize("ranks", [3, 2, 5])
def test_own_values_are_kept_for_every_rank_and_dealt_out_again(tmp_path: Path, ranks: int) -> None:
    path = str(tmp_path / "store")
    results(3, save_own, path)
    for rank, (w, rng, loader, said) in enumerate(results(ranks, load_own, path, True)):
        assert w == [float(rank % 3)] * 2
        assert rng
        assert loader == {"at": rank % 3}
        if ranks == 3:
            assert said == []
        else:
            assert any(
                "w, rng, loader" in text and f"rank {rank} gets what rank {rank % 3} had" in text for text in said
            )


def rank_0_alone(rank: int, ranks: int, path: str) -> None:
    store = tierload.open(path, mode="w", settings=SETTINGS)
    for step in range(3):
        store.save({"w": spread(whole((8, 2), step), (4,), [Shard(0)])}, step=step)
    if rank == 0:
        store.tag("first", 0)
        store.record("/lr", 0.5)
        store.rollback(1)
        store.collect(keep=2)
    else:
        for refused in (lambda: store.tag("x"), lambda: store.record("/lr", 1), lambda: store.rollback(1)):
            with pytest.raises(tierload.InvalidRequest, match="rank 0"):
                refused()
    dist.barrier()
    state = {"w": spread(whole((8, 2), 9), (4,), [Shard(0)])}
    tierload.load(path, into=state)
    assert torch.equal(state["w"].to_local(), spread(whole((8, 2), 1), (4,), [Shard(0)]).to_local())
    dist.barrier()
    store.save({"w": spread(whole((8, 2), 3), (4,), [Shard(0)])}, step=3)
    assert [commit.step for commit in store.commits() if not commit.superseded][:1] == [3]


def test_rank_0_tags_records_rolls_back_and_collects_and_saving_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    results(4, rank_0_alone, path)
    with tierload.open(path) as store:
        assert store.verify(full=True).ok
        found: Any = store.load(tag="first")
        assert torch.equal(found["w"], whole((8, 2), 0))
        assert store.recorded() == {}  # it went back with the rollback


def alone(rank: int, ranks: int, folder: str) -> None:
    mine = tierload.Settings(ranks="one")
    if rank == 1:
        tierload.save({"w": torch.ones(2)}, f"{folder}/one", settings=mine)
    with pytest.raises(tierload.UnsupportedValue, match="part of a tensor of shape"):
        tierload.save({"w": spread(whole((8, 2)), (4,), [Shard(0)])}, f"{folder}/{rank}", settings=mine)
    tierload.save({"w": spread(whole((8, 2)), (4,), [Replicate()])}, f"{folder}/{rank}", settings=mine)


def test_one_rank_saves_alone_where_it_is_told_to(tmp_path: Path) -> None:
    results(4, alone, str(tmp_path))
    with tierload.open(tmp_path / "one") as store:
        head = store.head()
        assert head is not None
        assert head.ranks == 1


def tied(rank: int, ranks: int, path: str, per_rank: tuple[str, ...]) -> dict[str, Any]:
    settings = tierload.Settings(page_bytes=4096, pack_below_bytes=1024, per_rank=per_rank, rank_timeout_seconds=20)
    large, small = whole((20, 100)), torch.ones(5)
    state = {"a": large, "b": large, "c": {"d": large[2:4]}, "s": small, "u": small, "z": [small]}
    tierload.save(state, path, settings=settings)
    found: Any = tierload.load(path)
    assert torch.equal(found["b"], whole((20, 100)))
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["s"].data_ptr() == found["z"][0].data_ptr()
    return {key: found[key] for key in ("a", "u")}


@pytest.mark.parametrize("per_rank", [("a",), ("z",), ("c", "u")], ids=str)
def test_what_shares_memory_with_own_values_is_own_too(tmp_path: Path, per_rank: tuple[str, ...]) -> None:
    path = str(tmp_path / "store")
    results(2, tied, path, per_rank)
    with tierload.open(path) as store:
        assert store.verify(full=True).ok


def resaved(rank: int, ranks: int, path: str) -> tuple[int, int]:
    state = {"w": spread(whole((240, 8192)), (ranks,), [Shard(0)]), "same": whole((100_000,), 1)}
    settings = tierload.Settings(page_bytes=1 << 16, compression="off", rank_timeout_seconds=20)
    report = tierload.save(state, path, settings=settings)
    return report.commit.written_bytes, report.commit.raw_bytes


def test_another_number_of_ranks_writes_only_the_pages_that_are_cut_otherwise(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    results(4, resaved, path)
    written, raw = results(3, resaved, path)[0]
    assert written <= 3 * 2 * (1 << 16), "at most the first and the last page of each rank"
    assert raw == 240 * 8192 * 4 + 100_000 * 4


def too_large(rank: int, ranks: int, path: str) -> float:
    state = {"w": spread(whole((1024, 65536)), (2,), [Shard(0)])}  # 128 MiB a rank
    settings = tierload.Settings(host_budget_bytes=64 << 20, rank_timeout_seconds=30, compression="off")
    pending = tierload.async_save(state, path, step=1, settings=settings)
    assert pending.done()
    state["w"].to_local().zero_()
    return pending.durable().raw_bytes


def test_a_state_beyond_the_budget_is_written_while_the_call_waits(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert results(2, too_large, path) == [256 << 20] * 2
    with tierload.open(path) as store:
        found: Any = store.load()
        assert torch.equal(found["w"], whole((1024, 65536)))


def damaged(rank: int, ranks: int, path: str) -> list[int]:
    state = {"w": spread(whole((64, 4096)), (ranks,), [Shard(0)]), "own": torch.full((3,), float(rank))}
    written = []
    for step in range(3):
        written.append(tierload.save(state, path, step=step, settings=SETTINGS).written_pages)
        dist.barrier()
        if step == 1 and rank == 0:
            for shard in Path(path, "man").glob("*.r0001*"):
                shard.write_bytes(b"x" * shard.stat().st_size)
        dist.barrier()
    return written


def test_a_rank_whose_last_shard_is_damaged_writes_its_part_afresh(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first, second = results(2, damaged, path)
    assert first[1:] == [0, 0]
    assert second[1] == 0
    assert second[2] == second[0] > 0
    with tierload.open(path) as store:
        found: Any = store.load()
        assert torch.equal(found["w"], whole((64, 4096)))


def told(rank: int, ranks: int, path: str) -> tuple[Any, ...]:
    state, metrics = {"w": torch.ones(2)}, {"loss": float(rank)}
    commit = tierload.save(
        state, path, step=1, metrics=metrics, note=f"of {rank}", tags=[f"t{rank}"], settings=SETTINGS
    ).commit
    return commit.metrics, commit.note, commit.tags, commit.id


def test_every_rank_is_told_what_was_committed_which_is_what_rank_0_said_of_it(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    ranks = results(3, told, path)
    with tierload.open(path) as store:
        head = store.find()
    assert ranks == [(head.metrics, head.note, head.tags, head.id)] * 3
    assert head.metrics == {"loss": 0.0}
    assert head.tags == ("t0",)
