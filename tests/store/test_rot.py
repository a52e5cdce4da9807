"""Rot: every byte of a small store is damaged, and files are cut, zeroed, swapped and lost. Nothing may go unnoticed.

What may change without a word, because docs/FORMAT.md gives it no meaning (section 5.1):

* bytes of a journal behind its last record: zero fill, and the padding of the last group;
* LOCK: whoever opens it wrote its own name there, for messages; the lock itself is the kernel's.

Everything else is a damage that `verify` reports, and no damage of one place in SUPER, wal/ or man/ loses a commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.rescue.support import flip
from tests.state.alike import assert_alike
from tests.store.ondisk import SECTOR, PageAt, files_of, journal_end, pages_of, sectors_up
from tests.store.support import (
    SMALL,
    Sample,
    assert_whole,
    catalog_of,
    copied,
    damage_byte,
    make_sample,
    manifest_of,
    native,
    ram_folder,
    writer,
)
from tierload import CorruptPage, CorruptStore, TierloadError, VerifyReport, _native

SHARDS = 4  # so that several workers share the work


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    with ram_folder() as folder:
        sample = make_sample(folder / "store")
        for path in (folder / "store" / "wal").iterdir():  # 4 KiB of zero fill are as good as 60
            end = sectors_up(journal_end(path.read_bytes())) + SECTOR
            os.truncate(path, min(end, path.stat().st_size))
        yield sample


def meaningless(sample: Sample, path: str) -> int:
    """From this offset on, a file's bytes mean nothing."""
    if path == "LOCK":
        return 0
    file = sample.path / path
    return journal_end(file.read_bytes()) if path.startswith("wal/") else file.stat().st_size


def newest_journal(sample: Sample) -> str:
    return max(path.name[1:] for path in (sample.path / "wal").iterdir())


def flip_each(path: Path, offsets: range, check: Callable[[int], str]) -> None:
    """Flips a bit of each byte in turn; `check` says what is wrong then, or nothing."""
    data = path.read_bytes()
    wrong: dict[str, list[int]] = {}
    file = os.open(path, os.O_RDWR)
    try:
        for at in offsets:
            os.pwrite(file, bytes([data[at] ^ 1 << at % 8]), at)
            if problem := check(at):
                wrong.setdefault(problem, []).append(at)
            os.pwrite(file, data[at : at + 1], at)
    finally:
        os.pwrite(file, data, 0)
        os.close(file)
    found = [f"{problem}: {len(places)} bytes, {places[0]} to {places[-1]}" for problem, places in wrong.items()]
    assert not found, f"{path.name}: {'; '.join(found)}"


# -- a bit flip in every byte


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_byte_of_super_and_of_the_journal(sample: Sample, shard: int) -> None:
    """What is found is the same, byte for byte, and a reader is told. (`verify` reports a reader's warnings: below.)"""
    name = newest_journal(sample)
    for path in ("SUPER", f"wal/c{name}", f"wal/m{name}", "LOCK"):
        end = meaningless(sample, path)

        def check(at: int, end: int = end) -> str:
            try:
                store = native(sample.path)
            except TierloadError as error:
                return f"does not open ({error})"
            told = bool(store.warnings or store.damage)
            whole = catalog_of(store) == sample.catalog and not store.head_damage
            store.close()
            return "" if whole and (told or at >= end) else "silent" if whole else "loses something"

        flip_each(sample.path / path, range(shard, (sample.path / path).stat().st_size, SHARDS), check)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_byte_of_older_journals(sample: Sample, shard: int) -> None:
    """They hold the history that rollbacks to an LSN need."""
    name = newest_journal(sample)
    with tierload.open(sample.path, settings=SMALL) as store:
        records = len(list(store.history()))
        for path in (p for p in files_of(sample.path) if p.startswith("wal/") and not p.endswith(name)):
            end = meaningless(sample, path)

            def check(at: int, end: int = end) -> str:
                if at < end and store.verify().ok:
                    return "silent"
                return "" if at % 61 or len(list(store.history())) == records else "loses history"

            flip_each(sample.path / path, range(shard, (sample.path / path).stat().st_size, SHARDS), check)


@pytest.mark.parametrize("mirror", [False, True])
def test_every_byte_of_a_manifest(sample: Sample, mirror: bool) -> None:
    """`verify` reports what `check_manifests` says of the copies, and loading goes on with the other one."""
    store = native(sample.path)
    for name, txid in {store.manifest(record.txid).path: record.txid for record in store.commits()}.items():
        path = sample.path / (name + ".m" * mirror)

        def check(at: int, txid: int = txid, name: str = path.name) -> str:
            told = store.check_manifests(txid)
            copies = told[0][1:] if len(told) == 1 else ("", "")
            if name not in copies[mirror] or copies[not mirror]:
                return f"told {told}"
            return "lost" if store.check_commit(txid) else ""

        flip_each(path, range(path.stat().st_size), check)


def pages_by_segment(sample: Sample) -> dict[str, dict[int, PageAt]]:
    found: dict[str, dict[int, PageAt]] = {}
    for path in (sample.path / "man").iterdir():
        for page in pages_of(path.read_bytes()):
            found.setdefault(page.path, {})[page.offset] = page
    return found


def test_every_byte_of_a_segment(sample: Sample) -> None:
    """The stored bytes and the padding behind them; a commit that has no part in the page is not touched."""
    pages = pages_by_segment(sample)
    store = native(sample.path)
    manifests = [store.manifest(record.txid) for record in store.commits()]
    tables = {manifest.path: manifest for manifest in manifests}
    for path in (path for path in files_of(sample.path) if path.startswith("seg/")):
        assert sorted(pages[path]) == list(range(0, (sample.path / path).stat().st_size, SECTOR))
        first = path.replace("seg/", "man/").removesuffix(".0000")  # of the commit that wrote the segment
        every = np.arange(len(tables[first].pages) // 64, dtype=np.uint32)

        def check(at: int, path: str = path, table: _native.Manifest = tables[first], every: Any = every) -> str:
            told = [(where, offset) for _, where, offset, _ in table.check(pages=every, threads=1, progress=None)]
            return "" if told == [(path, at // SECTOR * SECTOR)] else f"told of {told}"

        flip_each(sample.path / path, range((sample.path / path).stat().st_size), check)


def test_a_flip_as_a_user_sees_it(sample: Sample) -> None:
    """Open, verify, load everything: every 61st byte of every file."""
    pages = pages_by_segment(sample)
    for path in files_of(sample.path):
        end = meaningless(sample, path)

        def check(at: int, path: str = path, end: int = end) -> str:
            with tierload.open(sample.path, settings=SMALL) as store:
                report = store.verify(full=True)
                if report.ok and at < end:
                    return "silent"
                if not path.startswith("seg/"):
                    assert_whole(store, sample)
                    return ""
                page = pages[path][at // SECTOR * SECTOR]
                assert [(d.path, d.offset, d.keys) for d in report.damages] == [(path, page.offset, page.keys)]
                return check_loads(store, sample, set(report.damages[0].commits), at < page.offset + page.stored)

        flip_each(sample.path / path, range(7, (sample.path / path).stat().st_size, 61), check)


def check_loads(store: tierload.Store, sample: Sample, named: set[str], damaged: bool) -> str:
    """Commits that have the damaged page do not load, all others do. Damage in the padding is no reason not to load."""
    for commit in sample.order:
        try:
            assert_alike(store.load(commit=commit), sample.contents[commit])
            if damaged and commit in named:
                return "loads a damaged page"
        except CorruptPage as error:
            if not damaged or commit not in named or error.commit != commit:
                return "does not load a whole commit"
    return ""


def test_metadata_that_is_damaged_opens_for_writing_and_keeps_all(sample: Sample, ram: Path) -> None:
    """Every 97th byte of SUPER, wal/ and man/."""
    for path in (path for path in files_of(sample.path) if not path.startswith("seg/")):

        def check(at: int) -> str:
            with writer(copied(sample.path, ram / "copy")) as store:
                assert [commit.id for commit in store.commits()] == sample.order[::-1]
                assert catalog_of(store._native) == sample.catalog
                assert not store._native.head_damage
            with tierload.open(ram / "copy", settings=SMALL) as store:
                assert_whole(store, sample)
            return ""

        flip_each(sample.path / path, range(5, (sample.path / path).stat().st_size, 97), check)


# -- what a person is told


@pytest.mark.parametrize("key", ["w", "z", "r", "b"])
def test_loading_a_damaged_page_says_which(sample: Sample, ram: Path, key: str) -> None:
    path = copied(sample.path, ram / "copy")
    head = sample.head
    with tierload.open(path) as store:
        manifest = (path / manifest_of(store, store.commits()[0])).read_bytes()
    number, page = max((n, p) for n, p in enumerate(pages_of(manifest)) if key in p.keys)
    damage_byte(path / page.path, page.offset + page.stored // 2)
    with pytest.raises(CorruptPage) as found:
        tierload.load(path)
    error = found.value
    assert (error.commit, error.key, error.page) == (head, key, number)
    assert (error.path, error.offset) == (page.path, page.offset)
    for part in (head[:12], "step 2", repr(key), f"page {number}", page.path, f"byte {page.offset}"):
        assert part in str(error)
    target = {name: torch.full_like(value, 9) for name, value in sample.contents[head].items() if name in "wzrb"}
    with pytest.raises(CorruptPage) as found:
        tierload.load(path, into=target, keys=list("wzrb"))
    for name, value in target.items():
        if name not in found.value.overwritten:
            assert bool((value == 9).all()), f"{name} was filled and is not listed"
    report: VerifyReport = tierload.open(path).verify(full=True)
    assert not report.ok
    assert report.damages[0].keys == (key,)


def test_both_copies_of_a_group_that_was_acknowledged(sample: Sample, ram: Path) -> None:
    """Two faults in the same record: the store opens for reading before it, says so, and nothing is changed."""
    path = copied(sample.path, ram / "copy")
    for copy in "cm":
        damage_byte(path / f"wal/{copy}{newest_journal(sample)}", 2 * SECTOR + 70)  # the group of commit 2
    before = {name: (path / name).read_bytes() for name in files_of(path) if name.startswith("wal/")}
    with tierload.open(path) as store:
        assert store.damage
        assert not store.verify().ok
        assert [commit.id for commit in store.commits()] == sample.order[:1]
        assert_alike(store.load(), sample.contents[sample.order[0]])
    with pytest.raises(CorruptStore):
        writer(path)
    assert before == {name: (path / name).read_bytes() for name in files_of(path) if name.startswith("wal/")}


def test_a_head_whose_manifests_are_both_damaged(sample: Sample, ram: Path) -> None:
    """Loading goes to the newest whole commit and says so; the head by name is an error; a rollback mends the store."""
    path = copied(sample.path, ram / "copy")
    with writer(path) as store:
        changed = {**sample.contents[sample.head], "b": torch.arange(40) * 9}
        head = store.save(changed, step=4).commit
        manifest = manifest_of(store, store.commits()[0])
    for copy in ("", ".m"):
        damage_byte(path / (manifest + copy), 300)
    with tierload.open(path) as store:
        with pytest.warns(UserWarning, match=head.id[:12]):
            assert_alike(store.load(), sample.contents[sample.head])
        with pytest.raises(CorruptStore):
            store.load(commit=head.id)
        assert any(head.id in damage.commits for damage in store.verify().damages)
    with writer(path) as store:
        store.rollback(sample.head)
        assert_alike(store.load(), sample.contents[sample.head])
    with tierload.open(path) as store:
        assert_alike(store.load(), sample.contents[sample.head])


def test_every_part_of_a_large_manifest_is_verified(ram: Path) -> None:
    """One of many MiB is verified by several threads; what each of them finds is told, the first of it."""
    path = ram / "store"
    state = {f"layer.{number}.scale": torch.tensor(float(number)) for number in range(80_000)}
    with tierload.Store(path, mode="w") as store:
        store.save(state, step=1)
    (manifest,) = (each for each in (path / "man").iterdir() if not each.name.endswith(".m"))
    size = manifest.stat().st_size
    assert size > 8 << 20
    leaf = 64 << 10
    later = size - 2 * leaf
    flip(manifest, later)  # it is not the one to be named
    for offset in (300, leaf, size // 4, size // 2 - 1, size // 2 + leaf, 3 * size // 4, later - leaf):
        flip(manifest, offset)
        with tierload.open(path) as store:
            ((_, problem, mirror),) = store._native.check_manifests(1)
            assert f"at byte {offset // leaf * leaf} do not match" in problem
            assert mirror == ""
            assert store.info("layer.77.scale").nbytes == 4, "the mirror serves"
        flip(manifest, offset)
    flip(manifest, later)
    with tierload.open(path) as store:
        assert store._native.check_manifests(1) == []
