"""Several ranks write one transaction: what the native core promises them, before anything of torch comes in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.store.support import damage_byte, native
from tierload import _native
from tierload.errors import CorruptStore, InvalidRequest, StoreFenced
from tierload.layout import segment_sizes

RANKS = 3
RAW = 8192


def pages_of(data: np.ndarray) -> _native.PageSet:
    return _native.PageSet.of(
        pointers=np.array([data.ctypes.data], np.uint64),
        lengths=np.array([data.nbytes], np.uint64),
        part_views=np.zeros(1, np.uint32),
        part_offsets=np.zeros(1, np.uint64),
        views=np.zeros(0, np.int64),
        parts_of_page=np.ones(1, np.uint32),
        item_sizes=np.ones(1, np.uint8),
        floating=np.zeros(1, np.uint8),
        packed=np.zeros(1, np.uint8),
    )


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, RAW, np.uint8)


def write_page(save: _native.Save, data: np.ndarray, parents: tuple[_native.Manifest, ...] = ()) -> None:
    """The pages of a shard: one."""
    save.write(
        pages=pages_of(data),
        staging=None,
        parents=list(parents),
        compression="off",
        device_rate=0.0,
        read_rate=0.0,
        threads=0,
        segment_bytes=1 << 20,
        flush_interval_ms=0,
        bucket=None,
        background=False,
        cancel=None,
        progress=None,
    )


def write(save: _native.Save, data: np.ndarray, parents: tuple[_native.Manifest, ...] = ()) -> None:
    write_page(save, data, parents)
    chunk = np.zeros(64, np.uint8)
    chunk[:8] = _native.key_hashes(keys=b"w", lengths=np.ones(1, np.int64)).view(np.uint8)
    chunk[16], chunk[20], chunk[22], chunk[44] = 1, 2, 1, 1
    chunk[32:40] = np.array([data.nbytes], np.uint64).view(np.uint8)
    dims = np.array([data.nbytes, 0, data.nbytes], np.int64).view(np.uint8)
    save.write_manifest(page_bytes=1 << 20, chunks=chunk, dims=dims, keys=b"w", state=b"{}")


def read(manifest: _native.Manifest) -> np.ndarray:
    out = np.zeros(RAW, np.uint8)
    manifest.read(
        pages=np.zeros(1, np.uint32),
        offsets=np.zeros(1, np.uint32),
        pointers=np.array([out.ctypes.data], np.uint64),
        lengths=np.array([out.nbytes], np.uint64),
        threads=0,
        touched=np.zeros(1, np.uint8),
        progress=None,
    )
    return out


class Job:
    """A store that rank 0 holds, and the readers that the other ranks have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = native(path, writable=True)
        self.others = [native(path) for _ in range(1, RANKS)]

    def begin(self) -> list[_native.Save]:
        first = _native.Save(self.store, ranks=RANKS)
        return [first] + [
            _native.Save.of_rank(store, epoch=first.epoch, txid=first.txid, rank=rank, ranks=RANKS)
            for rank, store in enumerate(self.others, 1)
        ]

    def commit(self, numbers: list[int]) -> _native.CommitRecord:
        saves = self.begin()
        for save, number in zip(saves, numbers, strict=True):
            write(save, content(number))
            save.flush()
        record = finish(saves)
        for save in saves[1:]:
            save.done()
        return record


def finish(saves: list[_native.Save]) -> _native.CommitRecord:
    rows = b"".join(save.row for save in saves)
    return saves[0].commit(step=1, meta=b"{}", tags=[], rows=rows, raw_bytes=RANKS * RAW)


@pytest.fixture
def job(ram: Path) -> Job:
    return Job(ram / "store")


def held(store: _native.Store, txid: int) -> list[np.ndarray]:
    return [read(store.manifest(txid, rank)) for rank in range(RANKS)]


def test_one_commit_has_what_every_rank_wrote(job: Job) -> None:
    record = job.commit([1, 2, 3])
    job.store.close()
    reader = native(job.path)
    assert (record.ranks, record.raw_bytes, reader.head) == (RANKS, RANKS * RAW, record.txid)
    for rank, data in enumerate(held(reader, record.txid)):
        assert np.array_equal(data, content(rank + 1))
    assert len(reader.root(record.txid)) == RANKS * 64
    assert _native.super_of(str(job.path)) == (reader.id, reader.epoch)


def test_a_rank_that_did_not_change_hands_its_old_row_in_again(job: Job) -> None:
    before = job.commit([1, 2, 3])
    rows = [job.store.root(before.txid)[at : at + 64] for at in range(0, RANKS * 64, 64)]
    saves = job.begin()
    for save, row in zip(saves[:-1], rows, strict=False):
        save.refer(row)
    write(saves[-1], content(4))
    for save in saves:
        save.flush()
    after = finish(saves)
    root = job.store.root(after.txid)
    assert root[: 2 * 64] == rows[0] + rows[1]
    assert root[2 * 64 :] != rows[2]
    job.store.collect([before.txid])
    assert job.store.check_manifests(after.txid) == []
    assert job.store.check_commit(after.txid) == ""
    for data, number in zip(held(job.store, after.txid), [1, 2, 4], strict=True):
        assert np.array_equal(data, content(number))


def test_pages_of_any_parent_are_referred_to(job: Job) -> None:
    before = job.commit([1, 2, 3])
    parents = tuple(job.store.manifest(before.txid, rank) for rank in range(RANKS))
    saves = job.begin()
    for save, number in zip(saves, [3, 1, 2], strict=True):
        write(save, content(number), parents)
        save.flush()
        assert save.written_pages == 0
    after = finish(saves)
    sizes = [segment_sizes(job.store.manifest(after.txid, rank).segments) for rank in range(RANKS)]
    assert [len(each) for each in sizes] == [1] * RANKS
    assert np.array_equal(held(job.store, after.txid)[0], content(3))


def test_nothing_of_an_attempt_that_is_given_up_stays(job: Job) -> None:
    job.commit([1, 2, 3])
    before = sorted(path.name for path in job.path.rglob("*") if path.parent.name in ("man", "seg"))
    saves = job.begin()
    for save, number in zip(saves, [4, 5, 6], strict=True):
        write(save, content(number))
    saves[1].flush()
    for save in reversed(saves):
        save.abort()
    assert before == sorted(path.name for path in job.path.rglob("*") if path.parent.name in ("man", "seg"))


def test_a_row_is_handed_in_only_when_the_shard_is_durable(job: Job) -> None:
    saves = job.begin()
    write(saves[1], content(1))
    with pytest.raises(InvalidRequest, match="flush"):
        _ = saves[1].row
    saves[1].flush()
    assert len(saves[1].row) == 64
    with pytest.raises(InvalidRequest, match="handed"):
        write(saves[1], content(2))


def test_a_row_of_an_earlier_attempt_is_refused_by_name(job: Job) -> None:
    job.commit([1, 2, 3])
    given_up = job.begin()
    write(given_up[2], content(4))
    given_up[2].flush()
    late = given_up[2].row
    given_up[0].abort()
    saves = job.begin()
    for save, number in zip(saves, [5, 6, 7], strict=True):
        write(save, content(number))
        save.flush()
    with pytest.raises(InvalidRequest, match=r"rank 2 .*transaction 2.*earlier attempt"):
        saves[0].commit(step=1, meta=b"{}", tags=[], rows=saves[0].row + saves[1].row + late)
    with pytest.raises(InvalidRequest, match="needs a row of each"):
        saves[0].commit(step=1, meta=b"{}", tags=[], rows=saves[0].row + saves[1].row)
    assert finish(saves).txid == 3


def test_a_rank_of_a_writer_that_was_replaced_is_fenced(job: Job) -> None:
    saves = job.begin()
    write(saves[1], content(1))
    job.store.close()
    successor = native(job.path, writable=True)
    with pytest.raises(StoreFenced, match="took the store over"):
        saves[1].flush()
    saves[1].abort()
    successor.collect([])
    assert not [*(job.path / "seg").iterdir(), *(job.path / "man").iterdir()]


@pytest.mark.parametrize("lost", ["root", "r0001"])
def test_damage_in_both_copies_is_found_by_verification_and_named(job: Job, lost: str) -> None:
    record = job.commit([1, 2, 3])
    job.store.close()
    files = sorted((job.path / "man").glob(f"*.{lost}*"))
    assert len(files) == 2
    damage_byte(files[0], 100)
    reader = native(job.path)
    assert [bool(first) + 2 * bool(mirror) for _, first, mirror in reader.check_manifests(record.txid)] == [1]
    assert reader.check_commit(record.txid) == ""
    damage_byte(files[1], 100)
    assert lost in reader.check_commit(record.txid)
    with pytest.raises(CorruptStore, match=lost):
        native(job.path).manifest(record.txid, 1)


def test_a_shard_of_another_transaction_is_named_as_such(job: Job) -> None:
    old, new = job.commit([1, 2, 3]), job.commit([4, 5, 6])
    for mirror in ("", ".m"):
        stale = (job.path / (job.store.manifest_path(old.txid, 2) + mirror)).read_bytes()
        (job.path / (job.store.manifest_path(new.txid, 2) + mirror)).write_bytes(stale)
    message = job.store.check_commit(new.txid)
    assert f"shard of rank 2 is of transaction {old.txid}" in message
    assert f"the commit's root says {new.txid}" in message


def test_the_head_is_damaged_when_a_rank_has_lost_its_shard(job: Job) -> None:
    record = job.commit([1, 2, 3])
    for path in (job.path / "man").glob("*.r0002*"):
        path.unlink()
    assert "r0002" in native(job.path).head_damage
    assert native(job.path).head == record.txid


def test_a_rollback_has_the_root_of_its_source(job: Job) -> None:
    first, _ = job.commit([1, 2, 3]), job.commit([4, 5, 6])
    back = job.store.rollback(job.store.state_at(first.lsn), b"{}")
    assert job.store.root(back.txid) == job.store.root(first.txid)
    job.store.collect([first.txid])
    assert np.array_equal(held(job.store, back.txid)[2], content(3))


def test_digests_of_pages_are_those_that_a_manifest_has(job: Job) -> None:
    record = job.commit([1, 2, 3])
    data = content(2)
    digests = _native.page_digests(pages=pages_of(data), threads=2)
    assert digests.shape == (1, 2)
    assert digests.tobytes() == job.store.manifest(record.txid, 1).pages[:16].tobytes()
