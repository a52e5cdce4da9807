"""Stores of other releases: what is newer is refused with the release that is needed, what may be ignored is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import tierload
from tests.rescue.support import simple
from tests.store.ondisk import SECTOR, patched
from tests.store.probe import META, Forger, probe
from tests.store.support import writer
from tierload import UnsupportedFormat

RELEASE = b"7.5.0"
SEVERAL = [(8, "I", 2), (8, "I", 0), (8, "I", 2**32 - 1), (24, "Q", 2), (24, "Q", 1 << 63)]
"""Format version and incompatible bits, as they stand in SUPER and in a journal's header."""


def store(path: Path) -> Forger:
    builder = Forger(path)
    simple(builder, 1, step=1, meta=META)
    return builder


def super_says(path: Path, *changes: tuple[int, str, int | bytes]) -> None:
    data = (path / "SUPER").read_bytes()
    slots = [data[:SECTOR], data[SECTOR:]]
    for offset, form, value in (*changes, (80, "16s", RELEASE)):
        slots = [patched(slot, offset, "<" + form, value) for slot in slots]
    (path / "SUPER").write_bytes(b"".join(slots))


def journal_says(path: Path, offset: int, form: str, value: int, copies: str = "cm") -> None:
    for file in (path / "wal").iterdir():
        if file.name[0] in copies:
            data = file.read_bytes()
            file.write_bytes(patched(data[:SECTOR], offset, "<" + form, value) + data[SECTOR:])


def is_refused(path: Path) -> str:
    """For readers and writers, with the release that is needed, and nothing is written."""
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "LOCK"}
    texts = []
    openings: list[Callable[[], object]] = [
        lambda: tierload.load(path),
        lambda: tierload.open(path),
        lambda: writer(path),
    ]
    for opening in openings:
        with pytest.raises(UnsupportedFormat) as found:
            opening()
        texts.append(str(found.value))
    changed = [file.name for file, data in before.items() if file.name != "SUPER" and file.read_bytes() != data]
    assert not changed
    assert all("7.5" in text for text in texts), texts
    return texts[0]


@pytest.mark.parametrize(("offset", "form", "value"), SEVERAL)
def test_a_newer_super(ram: Path, offset: int, form: str, value: int) -> None:
    store(ram / "store")
    super_says(ram / "store", (offset, form, value))
    assert str(ram / "store") in is_refused(ram / "store")


@pytest.mark.parametrize(("offset", "form", "value"), SEVERAL)
def test_a_newer_journal(ram: Path, offset: int, form: str, value: int) -> None:
    """SUPER knows which release reads the store, so the error can name it."""
    store(ram / "store")
    super_says(ram / "store")
    journal_says(ram / "store", offset, form, value)
    is_refused(ram / "store")


@pytest.mark.parametrize(("offset", "form", "value"), [(8, "I", 2), (8, "I", 0), (32, "Q", 1), (32, "Q", 1 << 63)])
def test_a_newer_manifest(ram: Path, offset: int, form: str, value: int) -> None:
    builder = store(ram / "store")
    builder.tamper = lambda body: struct.pack_into("<" + form, body, offset, value)
    simple(builder, 2, step=2, meta=META)
    super_says(ram / "store")
    is_refused(ram / "store")


@pytest.mark.parametrize("kind", [0, 6, 7, 8, 127, 255])
def test_a_newer_record(ram: Path, kind: int) -> None:
    builder = store(ram / "store")
    super_says(ram / "store")
    builder.record(kind, b"something new")
    assert f"type {kind}" in is_refused(ram / "store")


@pytest.mark.parametrize("kind", [6, 7, 8, 127, 255])
def test_a_record_that_may_be_skipped(ram: Path, kind: int) -> None:
    """Forth and back: it changes nothing, the commits around it are there, and so is the history."""
    builder = store(ram / "store")
    builder.record(kind, b"something new", flags=0x80)
    simple(builder, 2, step=2, meta=META)
    builder.record(kind, b"", flags=0x80)
    with tierload.open(ram / "store") as reader:
        assert [commit.step for commit in reader.commits()] == [2, 1]
        assert [change.lsn for change in reader.history()] == [5, 4, 3, 2, 1]
        assert reader._native.state_at(2).head == 1
    found = probe(ram / "store")
    assert {error for error, _ in found.values()} <= {"", "CommitNotFound"}, found
    assert found["damage"][1] == ""


def test_unknown_flags_of_a_known_record_are_no_reason_to_skip_it(ram: Path) -> None:
    builder = store(ram / "store")
    builder.record(4, struct.pack("<QQII", 0, 1, 1, 0) + b"x", flags=0x80)
    with tierload.open(ram / "store") as reader:
        assert set(reader.tags()) == {"x"}


def test_unknown_compatible_bits_are_ignored(ram: Path) -> None:
    path = ram / "store"
    builder = store(path)
    builder.tamper = lambda body: struct.pack_into("<Q", body, 24, 2**64 - 1)
    simple(builder, 2, step=2, meta=META)
    super_says(path, (16, "Q", 2**64 - 1))
    journal_says(path, 16, "Q", 2**64 - 1)
    found = probe(path)
    assert {error for error, _ in found.values()} <= {"", "CommitNotFound"}, found
    assert found["damage"][1] == ""


def test_reserved_bytes_are_ignored(ram: Path) -> None:
    path = ram / "store"
    builder = store(path)
    builder.tamper = lambda body: struct.pack_into("<80s", body, 176, b"\xff" * 80)
    simple(builder, 2, step=2, meta=META)
    super_says(path, (12, "I", 2**32 - 1), (96, "3996s", b"\xff" * 3996))
    for offset, form, value in [(12, "I", 2**32 - 1), (108, "Q", 2**64 - 1)]:
        journal_says(path, offset, form, value)
    found = probe(path)
    assert {error for error, _ in found.values()} <= {"", "CommitNotFound"}, found
    assert found["damage"][1] == ""


def test_a_slot_that_does_not_count_is_not_judged(ram: Path) -> None:
    """An older slot of another format: whoever upgraded, or went back, leaves one behind."""
    path = ram / "store"
    builder = store(path)
    builder.super(3, (1, 0), version=9, features=9)
    builder.super(4, (1, 0))
    with tierload.open(path) as reader:
        assert len(reader.commits()) == 1
    builder.super(5, (1, 0), version=9, features=9, release=b"7.5.0")
    is_refused(path)


def test_a_newer_format_in_one_copy_alone_is_damage(ram: Path) -> None:
    """Both copies are written alike, so this is no newer store; still, nothing may be made of it silently."""
    path = ram / "store"
    store(path)
    journal_says(path, 8, "I", 2, copies="m")
    try:
        with tierload.open(path) as reader:
            assert reader.verify().damages
            assert len(reader.commits()) == 1
    except UnsupportedFormat:
        pass
