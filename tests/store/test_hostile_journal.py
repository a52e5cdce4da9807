"""Hostile journals and SUPERs: every crc is right, and what they say is not.

As in test_hostile.py, in a child with little memory and time: for every call an error of tierload's own or a value, and
what a writer acknowledges afterwards is there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.rescue.builder import ABSENT, encode, padded
from tests.rescue.support import simple
from tests.store.ondisk import SECTOR, patched, records_of, root_row
from tests.store.probe import META, Forger, Outcomes, probe, unclean

SNAPSHOT, COMMIT, CHANGE, TAG, COLLECT = 1, 2, 3, 4, 5
Twist = Callable[[bytes], bytes]


def fields(offset: int, form: str, *values: int | bytes) -> Twist:
    def twist(payload: bytes) -> bytes:
        changed = bytearray(payload)
        struct.pack_into("<" + form, changed, offset, *values)
        return bytes(changed)

    return twist


def meta(text: bytes) -> Twist:
    """A COMMIT with another meta."""
    return lambda payload: payload[:72] + struct.pack("<II", len(text), 0) + payload[80:144] + padded(text)


def root(row: bytes, ranks: int = 1) -> Twist:
    def twist(payload: bytes) -> bytes:
        return payload[:36] + struct.pack("<I", ranks) + payload[40:80] + row + payload[144:]

    return twist


def change(
    key: bytes, before: bytes | None, after: bytes | None, says_key: int | None = None, says_before: int | None = None
) -> bytes:
    values = [v for v in (before, after) if v is not None]
    sizes = [ABSENT if v is None else len(v) for v in (before, after)]
    sums = [0 if v is None else xxhash.xxh3_64_intdigest(v) for v in (before, after)]
    sizes[0] = sizes[0] if says_before is None else says_before
    head = struct.pack("<B3xIII", 1, len(key) if says_key is None else says_key, *sizes)
    return padded(head + struct.pack("<QQ", *sums) + key + b"".join(values))


def tag(before: int, after: int, name: bytes, length: int | None = None) -> bytes:
    return struct.pack("<QQII", before, after, len(name) if length is None else length, 0) + name


DOCUMENT = b'{"version":1,"root":{"d":{"value":1,"step":null}}}'
DEEP = b'{"metrics":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
NESTED = b'{"metrics":' + b'{"d":{"a":' * 3000 + b"1" + b"}}" * 3000 + b"}"

COMMITS: dict[str, Twist] = {
    "no ranks": fields(36, "I", 0),
    "2^32-1 ranks": fields(36, "I", 2**32 - 1),
    "two ranks of which one is there": fields(36, "I", 2),
    "a meta of 2^32-1 bytes": fields(72, "I", 2**32 - 1),
    "2^32-1 changes": fields(76, "I", 2**32 - 1),
    "a parent that is itself": fields(8, "Q", 3),
    "a rollback to itself": fields(16, "QqI", 3, 0, 2),
    "a rollback into the future": fields(16, "QqI", 2**63, 0, 2),
    "a rollback to nothing": fields(16, "QqI", 0, 0, 2),
    "a rollback to what is not there": fields(16, "QqI", 2**64 - 1, 0, 2),
    "raw bytes of 2^64-1": fields(56, "QQ", 2**64 - 1, 2**64 - 1),
    "a step of -2^63": fields(24, "qI", -(2**63), 1),
    "unknown flags": fields(32, "I", 2**32 - 4),
    "a txid of an earlier commit": fields(0, "Q", 1),
    "a txid of 2^48": fields(0, "Q", 2**48),
    "a txid of 2^64-1": fields(0, "Q", 2**64 - 1),
    "a txid of 0": fields(0, "Q", 0),
    "another commit before it": fields(40, "QQ", 1, 2),
    "a meta that is no JSON": meta(b"{"),
    "a meta that is no UTF-8": meta(b'{"note":"\xff"}'),
    "a meta that is a list": meta(b'["metrics"]'),
    "a meta that is a text": meta(b'"metrics"'),
    "a meta that is nothing": meta(b""),
    "a meta that nests 200,000 deep": meta(DEEP),
    "metrics that nest 3,000 deep": meta(NESTED),
    "metrics that are a number": meta(b'{"metrics":5}'),
    "metrics with a tensor": meta(b'{"metrics":{"d":{"x":{"t":{"chunk":0,"shape":[1]}}}}}'),
    "a huge number": meta(b'{"metrics":{"d":{"x":1' + b"0" * 5000 + b"}}}"),
    "a note that is a number": meta(b'{"metrics":{"d":{}},"note":7}'),
    "a manifest of 2^62 bytes": root(root_row(b"x", 1, 2, length=1 << 62)),
    "a manifest of 2^64-1 bytes": root(root_row(b"x", 1, 2, length=2**64 - 1)),
    "a manifest of 0 bytes": root(root_row(b"", 1, 2)),
    "a manifest of 2^40 bytes": root(root_row(b"x", 1, 2, length=1 << 40)),
    "a manifest of epoch 2^64-1": root(root_row(b"x" * 300, 2**64 - 1, 2**64 - 1, rank=2**32 - 1)),
}

SNAPSHOTS: dict[str, Twist] = {
    "2^31 commits": fields(16, "I", 2**31),
    "2^32-1 tags": fields(20, "I", 2**32 - 1),
    "2^32-1 values": fields(24, "I", 2**32 - 1),
    "a head that is not there": fields(8, "Q", 77),
    "no head beside commits": fields(8, "Q", 0),
    "a head that is not the newest": fields(8, "Q", 1),
    "a next txid of 0": fields(0, "Q", 0),
    "a next txid that is taken": fields(0, "Q", 1),
    "a next txid of 2^64-1": fields(0, "Q", 2**64 - 1),
    "an entry of 2^32-1 bytes": fields(32 + 16, "I", 2**32 - 1),
    "bytes behind the end": lambda payload: payload + bytes(8),
    "nothing": lambda payload: b"",
    "a tag of nothing": lambda p: p[:20] + struct.pack("<I", 1) + p[24:] + padded(struct.pack("<QII", 99, 1, 0) + b"x"),
    "a tag that is no UTF-8": lambda p: p[:20] + struct.pack("<I", 1) + p[24:] + padded(tag(0, 1, b"\xff")[8:]),
    "a key that is no UTF-8": lambda p: p[:24] + struct.pack("<I", 1) + p[28:] + value_entry(b"\xff", DOCUMENT),
}


def value_entry(key: bytes, value: bytes) -> bytes:
    return padded(struct.pack("<II", len(key), len(value)) + key + value)


RECORDS: dict[str, tuple[int, bytes]] = {
    "a change of what is not there": (CHANGE, change(b"k", b"old", DOCUMENT)),
    "a change with a key of 2^32-1 bytes": (CHANGE, change(b"k", None, DOCUMENT, says_key=2**32 - 1)),
    "a change from 2^31 bytes": (CHANGE, change(b"k", None, DOCUMENT, says_before=2**31)),
    "a change to what is no document": (CHANGE, change(b"k", None, b"\x80\x04N.")),
    "a change to a document without a value": (CHANGE, change(b"k", None, b'{"version":1,"root":{"d":{}}}')),
    "a change to a list": (CHANGE, change(b"k", None, b'{"version":1,"root":[1]}')),
    "a change to a tensor": (CHANGE, change(b"k", None, DOCUMENT.replace(b"1,", b'{"t":{"chunk":0,"shape":[1]}},', 2))),
    "a change of a key that is no UTF-8": (CHANGE, change(b"\xff\xfe", None, DOCUMENT)),
    "a change of a long key": (CHANGE, change(b"k" * 100_000, None, DOCUMENT)),
    "an empty change": (CHANGE, b""),
    "a tag with a name of 2^32-1 bytes": (TAG, tag(0, 1, b"x", 2**32 - 1)),
    "a tag of a commit that is not there": (TAG, tag(0, 99, b"x")),
    "a tag that was elsewhere": (TAG, tag(1, 2, b"x")),
    "a tag that is no UTF-8": (TAG, tag(0, 1, b"\xff")),
    "a tag without a name": (TAG, tag(0, 1, b"")),
    "a collection of 2^32-1 commits": (COLLECT, struct.pack("<II", 2**32 - 1, 0)),
    "a collection of what is not there": (COLLECT, struct.pack("<II", 1, 0) + bytes(24)),
    "a second snapshot": (SNAPSHOT, struct.pack("<QQIIII", 1, 0, 0, 0, 0, 0)),
}


def forged(path: Path, kind: int, twist: Twist) -> Outcomes:
    """A store of two ordinary commits, of which a record of some kind is forged: the last COMMIT, or the SNAPSHOT."""
    builder = Forger(path)
    simple(builder, 1, step=1, meta=META)
    simple(builder, 2, step=2, meta=META)
    if kind == SNAPSHOT:
        builder.twists[kind] = twist
        builder.roll(epoch=2)
        builder.super(3, (2, 0))
    else:
        builder.twists[kind] = twist
        simple(builder, 3, step=3, meta=META)
    return probe(path)


@pytest.mark.parametrize("name", COMMITS)
def test_a_commit_that_lies(ram: Path, name: str) -> None:
    assert not unclean(forged(ram / "store", COMMIT, COMMITS[name]))


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_that_lies(ram: Path, name: str) -> None:
    assert not unclean(forged(ram / "store", SNAPSHOT, SNAPSHOTS[name]))


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_lies(ram: Path, name: str) -> None:
    builder = Forger(ram / "store")
    simple(builder, 1, step=1, meta=META)
    simple(builder, 2, step=2, meta=META)
    builder.record(*RECORDS[name])
    assert not unclean(probe(ram / "store"))


# -- journals' headers and SUPER


def forge_journal(path: Path, offset: int, form: str, *values: int) -> None:
    for copy in (path / "wal").iterdir():
        data = copy.read_bytes()
        copy.write_bytes(patched(data[:SECTOR], offset, "<" + form, *values) + data[SECTOR:])


@pytest.mark.parametrize(
    "predecessor",
    [(1, 0, 4, None), (1, 0, 2**64 - 1, 0), (2**64 - 1, 2**64 - 1, 1, 0), (9, 9, 9, 9), (0, 0, 9, 0), (1, 0, 1, None)],
    ids=str,
)
def test_a_journal_that_continues_itself_or_nothing(ram: Path, predecessor: tuple[int, int, int, int | None]) -> None:
    """Its chain begins with the crc that the header names, so a cycle can be made to fit."""
    path = ram / "store"
    builder = Forger(path)
    epoch, sequence, lsn, crc = predecessor
    simple(builder, 1, step=1, meta=META)
    builder.previous = (epoch, sequence, lsn, builder.chain if crc is None else crc)
    builder.lsn = 1 if crc is None else builder.lsn
    builder.journal(0)
    for number in (2, 3, 4):
        simple(builder, number, step=number, meta=META)
    assert len(records_of(builder.paths()[0].read_bytes())) == 4
    assert not unclean(probe(path))


@pytest.mark.parametrize("lsn", [2**63, 2**64 - 3, 2**64 - 1])
def test_numbers_of_records_that_are_odd(ram: Path, lsn: int) -> None:
    builder = Forger(ram / "store")
    builder.lsn = lsn
    builder.journal(0)
    try:
        simple(builder, 1, step=1, meta=META)
        simple(builder, 2, step=2, meta=META)
    except struct.error:
        pass  # the number after 2^64-1
    assert not unclean(probe(ram / "store"))


@pytest.mark.parametrize("epoch", [2**32 - 2, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_epochs_that_are_nearly_used_up(ram: Path, epoch: int) -> None:
    """A file's name has room for 32 bits: a writer must not acknowledge what nobody will find."""
    builder = Forger(ram / "store")
    simple(builder, 1, step=1, meta=META)
    builder.epoch = epoch
    for generation in (3, 4):
        builder.super(generation, (1, 0))
    found = probe(ram / "store")
    assert not unclean(found)
    assert found["load 1"][0] == "", found


@pytest.mark.parametrize("generation", [2**63, 2**64 - 2, 2**64 - 1])
def test_generations_that_are_nearly_used_up(ram: Path, generation: int) -> None:
    builder = Forger(ram / "store")
    simple(builder, 1, step=1, meta=META)
    builder.super(generation, (1, 0))
    found = probe(ram / "store")
    assert not unclean(found)
    assert found["load 1"][0] == "", found


@pytest.mark.parametrize("base", [(1, 1), (2**32, 0), (2**64 - 1, 2**64 - 1)], ids=str)
def test_a_base_that_is_not_there(ram: Path, base: tuple[int, int]) -> None:
    builder = Forger(ram / "store")
    simple(builder, 1, step=1, meta=META)
    builder.super(3, base)
    found = probe(ram / "store")
    assert not unclean(found)
    assert found["load 1"][0] == ""
    assert found["damage"][1]
    assert found["open for writing"][0] == "CorruptStore"


@pytest.mark.parametrize(
    "path", ["wal/c-00000001-00000000", "wal/c-00000001-00000001", "SUPER", "LOCK", "wal/c-00000000-00000000"]
)
def test_a_file_of_a_terabyte(ram: Path, path: str) -> None:
    """Sparse, so that it costs whoever made it nothing."""
    builder = Forger(ram / "store")
    simple(builder, 1, step=1, meta=META)
    file = ram / "store" / path
    file.touch()
    os.truncate(file, 1 << 40)
    found = probe(ram / "store")
    assert not unclean(found)
    assert found["load 1"][0] == "", found


def test_the_records_of_these_tests_are_read_when_nothing_is_forged(ram: Path) -> None:
    """Else a mistake in the forger would make every test above pass."""
    found = forged(ram / "store", COMMIT, lambda payload: payload)
    assert {call for call, (error, _) in found.items() if error} <= {"rollback"}, found
    builder = Forger(ram / "other")
    simple(builder, 1, step=1, meta=META)
    builder.record(CHANGE, change(b"k", None, DOCUMENT))
    builder.record(TAG, tag(0, 1, encode("t")))
    builder.roll(epoch=3)
    builder.super(3, (3, 0))
    found = probe(ram / "other")
    assert {call for call, (error, _) in found.items() if error} <= {"rollback"}, found
