"""Rot of whole files and sectors: cut, grown, zeroed, written to the wrong place, swapped, lost.

The same rule as in test_rot.py, for every single fault: nothing is silent but what means nothing, a fault in SUPER,
wal/ or man/ loses no commit, for readers and writers, and one in seg/ is an error and never wrong bytes.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tierload
from tests.state.alike import assert_alike
from tests.store.ondisk import SECTOR, files_of, journal_end, sectors_up
from tests.store.support import SMALL, Sample, assert_whole, copied, make_sample, ram_folder, writer
from tierload import CorruptStore

SHARDS = 4


@dataclass(frozen=True)
class Fault:
    kind: str
    paths: tuple[str, ...]
    apply: Callable[[Path], None]  # given the copy
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {' and '.join(self.paths)} {self.detail}"


def rewritten(path: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        (store / path).write_bytes(change((store / path).read_bytes()))

    return apply


def put(data: bytes, sector: int, content: bytes) -> bytes:
    return data[: sector * SECTOR] + content + data[(sector + 1) * SECTOR :]


def at(data: bytes, sector: int) -> bytes:
    return data[sector * SECTOR : (sector + 1) * SECTOR]


def cut_to(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


def zeroed(sector: int) -> Callable[[bytes], bytes]:
    return lambda data: put(data, sector, bytes(len(at(data, sector))))


def misdirected(source: int, target: int) -> Callable[[bytes], bytes]:
    return lambda data: put(data, target, at(data, source))


def swapped(one: int, other: int) -> Callable[[bytes], bytes]:
    return lambda data: put(put(data, one, at(data, other)), other, at(data, one))


def exchanged(one: str, other: str) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        (store / one).rename(store / "aside")
        (store / other).rename(store / one)
        (store / "aside").rename(store / other)

    return apply


def removed(path: str) -> Callable[[Path], None]:
    return lambda store: (store / path).unlink()


def faults_of(store: Path) -> Iterator[Fault]:
    paths = files_of(store)
    for path in paths:
        size = (store / path).stat().st_size
        whole = range(size // SECTOR)
        yield Fault("missing", (path,), removed(path))
        yield Fault("one byte more", (path,), rewritten(path, lambda data: data + b"\1"))
        for cut in sorted({size - 1, *range(0, size, SECTOR)}):
            yield Fault("cut", (path,), rewritten(path, cut_to(cut)), f"to {cut} of {size}")
        for sector in range(sectors_up(size) // SECTOR):
            yield Fault("zeroed", (path,), rewritten(path, zeroed(sector)), f"sector {sector}")
        for one, other in itertools.permutations(whole, 2):
            yield Fault("misdirected", (path,), rewritten(path, misdirected(one, other)), f"sector {one} to {other}")
        for one, other in itertools.combinations(whole, 2):
            yield Fault("swapped sectors", (path,), rewritten(path, swapped(one, other)), f"{one} and {other}")
    for one, other in itertools.combinations(paths, 2):
        same_size = (store / one).stat().st_size == (store / other).stat().st_size
        if os.path.dirname(one) == os.path.dirname(other) and (same_size or not one.startswith("seg/")) and "/" in one:
            yield Fault("exchanged", (one, other), exchanged(one, other))


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    with ram_folder() as folder:
        sample = make_sample(folder / "store")
        for path in (folder / "store" / "wal").iterdir():
            end = sectors_up(journal_end(path.read_bytes())) + SECTOR
            os.truncate(path, min(end, path.stat().st_size))
        yield sample


def changes(sample: Sample, copy: Path, path: str) -> bool:
    """Whether a file differs from the whole one where its bytes mean something."""
    whole = (sample.path / path).read_bytes()
    end = 0 if path == "LOCK" else journal_end(whole) if path.startswith("wal/") else None
    if not (copy / path).exists():
        return path != "LOCK"
    return (copy / path).read_bytes()[:end] != whole[:end]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_single_fault(sample: Sample, ram: Path, shard: int) -> None:
    copy = ram / "copy"
    wrong: list[str] = []
    done: Counter[str] = Counter()
    for fault in itertools.islice(faults_of(sample.path), shard, None, SHARDS):
        fault.apply(copied(sample.path, copy))
        matters = any(changes(sample, copy, path) for path in fault.paths)
        done[fault.kind] += matters
        try:
            with tierload.open(copy, settings=SMALL) as store:
                told = not store.verify(full=True).ok
                if fault.paths[0].startswith("seg/"):
                    load_what_is_whole(store, sample)
                else:
                    assert_whole(store, sample)
            if matters and not told:
                wrong.append(f"{fault}: silent")
            if not fault.paths[0].startswith("seg/"):
                write_and_read(copy, sample)
        except (tierload.TierloadError, AssertionError) as error:
            wrong.append(f"{fault}: {error!r:.300}")
    assert not wrong, "\n".join(wrong)
    assert set(done) == {"missing", "one byte more", "cut", "zeroed", "misdirected", "swapped sectors", "exchanged"}
    assert sum(done.values()) > 30


def load_what_is_whole(store: tierload.Store, sample: Sample) -> None:
    assert [commit.id for commit in store.commits()] == sample.order[::-1]
    for commit in sample.order:
        try:
            found = store.load(commit=commit)
        except CorruptStore:
            continue
        assert_alike(found, sample.contents[commit])


def write_and_read(copy: Path, sample: Sample) -> None:
    """The damaged store opens for writing, keeps all, takes a commit, and is then read again."""
    state = {**sample.contents[sample.head], "step": 9}
    with writer(copy) as store:
        assert_whole(store, sample)
        commit = store.save(state, step=9).commit.id
    with tierload.open(copy, settings=SMALL) as store:
        assert [found.id for found in store.commits()] == [commit, *sample.order[::-1]]
        assert_alike(store.load(), state)
        assert_alike(store.recorded(), sample.values)


def test_a_store_without_any_journal_says_so(sample: Sample, ram: Path) -> None:
    path = copied(sample.path, ram / "copy")
    shutil.rmtree(path / "wal")
    with pytest.raises(CorruptStore):
        tierload.open(path)
    with pytest.raises(CorruptStore):
        writer(path)
    assert not list((path / "wal").glob("*")), "nothing was begun that would hide the loss"


@pytest.mark.parametrize("gone", ["man", "seg"])
def test_a_folder_that_is_gone_is_damage_of_the_commits(sample: Sample, ram: Path, gone: str) -> None:
    path = copied(sample.path, ram / "copy")
    shutil.rmtree(path / gone)
    with tierload.open(path) as store:
        assert len(store.verify().damages) >= len(sample.order) - 1
        with pytest.raises(CorruptStore):
            store.load(commit=sample.head)


def test_a_journal_of_another_store_is_damage_of_that_copy(sample: Sample, ram: Path) -> None:
    """A restore that mixed two stores up. A header must have SUPER's store id (section 5), and the mirror has it."""
    path = copied(sample.path, ram / "copy")
    other = make_sample(ram / "other")
    name = max(file.name[1:] for file in (path / "wal").iterdir())
    for copy in "cm":
        shutil.copy(other.path / f"wal/{copy}{name}", path / f"wal/{copy}{name}")
        with tierload.open(path, settings=SMALL) as store:
            assert not store.verify().ok
            assert_whole(store, sample)
        copied(sample.path, path)
    for copy in "cm":
        shutil.copy(other.path / f"wal/{copy}{name}", path / f"wal/{copy}{name}")
    with pytest.raises(CorruptStore):
        writer(path)
