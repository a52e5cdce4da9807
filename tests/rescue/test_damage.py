"""What the rescue reader makes of damaged, torn and hostile stores."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
import zstandard

from tests.rescue.builder import LZ4, RAW, ZSTD, Builder, Chunk, array, planes, tensor
from tests.rescue.support import BIAS, RNG, STEPS, WEIGHT, file_of, flip, simple, value
from tierload import rescue
from tierload.rescue import manifest
from tierload.rescue.__main__ import main
from tierload.rescue.pages import decode_frame, decode_planes


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_planes_that_lie_are_damage() -> None:
    raw = RNG.integers(0, 9, 4096, np.uint8).tobytes()
    stored = planes(raw, 2, [LZ4, ZSTD])
    outcomes = set()
    for at in range(len(stored)):
        for bit in (1, 0x80):
            bad = bytearray(stored)
            bad[at] ^= bit
            try:
                outcomes.add(len(decode_planes(bytes(bad), 4096, 2)))
            except rescue.Damage:
                outcomes.add(-1)
    assert outcomes <= {4096, -1}
    for bad_length, item in ((4096, 4), (4095, 2), (1 << 19, 2)):
        with pytest.raises(rescue.Damage):
            decode_planes(stored, bad_length, item)


def test_a_frame_that_claims_a_huge_content_allocates_nothing() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    tracemalloc.start()
    with pytest.raises(rescue.Damage, match="content size"):
        decode_frame(3, bomb, 4096)
    with pytest.raises(rescue.Damage):
        decode_frame(2, b"\xff" * 100, 4096)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("copy", [0, 1])
def test_a_torn_tail_is_ignored(store: Path, copy: int) -> None:
    builder = Builder(store)
    simple(builder, 1)
    simple(builder, 2)
    offset, end = builder.where[3]
    for cut in (offset + 10, offset + 70, end - 9):
        damaged = store.with_name(f"cut{cut}")
        shutil.copytree(store, damaged)
        for path in builder.paths():
            os.truncate(damaged / "wal" / path.name, cut)
        report = rescue.Report()
        assert value(damaged, report=report) == 1
        assert not report.problems
    flip(builder.paths()[copy], offset + 100)  # what one copy has counts
    report = rescue.Report()
    assert value(store, report=report) == 2
    assert len(report.notes) == 1
    assert f"{'cm'[copy]}-00000001-00000000: LSN 3 at {offset}" in report.notes[0]


def test_a_torn_record_inside_of_a_group(store: Path) -> None:
    builder = Builder(store)
    first = simple(builder, 1)
    simple(builder, 2, last=False)
    builder.tag("torn", first)
    for path in builder.paths():
        flip(path, builder.where[4][0] + 66)
    report = rescue.Report()
    assert [c.tags for c in rescue.commits(store, report)] == [[], []]
    assert not report.problems


def test_records_are_taken_from_both_copies(store: Path) -> None:
    builder = Builder(store)
    for number in range(1, 7):
        simple(builder, number)
    for lsn in range(1, 8):
        flip(builder.paths()[lsn % 2], builder.where[lsn][0] + (70 if lsn % 3 else 9))
    flip(builder.paths()[0], 100)  # the header
    report = rescue.Report()
    assert [value(store, commit=n, report=report) for n in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert not report.problems
    builder.paths()[1].unlink()
    with pytest.raises(rescue.Damage):
        rescue.read(store)


@pytest.mark.parametrize("at", [9, 80])
def test_damage_to_acknowledged_records_is_named(store: Path, at: int, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(store)
    for number in range(1, 5):
        simple(builder, number)
    for path in builder.paths():
        flip(path, builder.where[4][0] + at)
    report = rescue.Report()
    assert value(store, report=report) == 2
    assert report.problems[0].startswith(f"journal 00000001-00000000: corrupt from LSN 4 at {builder.where[4][0]}")
    with pytest.raises(rescue.Damage, match="corrupt from LSN 4"):
        rescue.commits(store)
    assert main([str(store), "--to", str(store / "x.safetensors")]) == 1
    assert "damaged: journal 00000001-00000000: corrupt from LSN 4" in capsys.readouterr().err


def test_manifest_mirrors(store: Path) -> None:
    builder = Builder(store)
    root = {f"long key number {n:04}": tensor("", [1]) for n in range(2000)}
    chunks = {key: Chunk("uint8", (1,), bytes([n % 7]), pack="p") for n, key in enumerate(root)}
    for key in root:
        root[key]["t"]["chunk"] = key
    builder.commit(chunks, {"d": root})
    name = store / "man/00000001-000000000001.r0000"
    mirror = name.with_name(name.name + ".m")
    size = name.stat().st_size
    assert size > 200 << 10
    good = name.read_bytes()

    def check(problems: int, notes: int) -> None:
        report = rescue.Report()
        found = rescue.read(store, report=report)
        assert (len(report.problems), len(report.notes)) == (problems, notes)
        assert len(found) == 2000

    check(0, 0)
    flip(mirror, 300)
    check(0, 1)
    flip(name, 100_000)  # another leaf of the other copy
    check(0, 1)
    flip(name, size - 3)  # and its table of leaves
    check(0, 1)
    mirror.unlink()
    with pytest.raises(rescue.Damage, match="no copy of it"):
        rescue.read(store)
    mirror.write_bytes(good)
    name.unlink()
    check(0, 1)
    flip(mirror, 100_000)
    with pytest.raises(rescue.Damage, match="leaf at 65536 is damaged in every"):
        rescue.read(store)


def test_the_newest_whole_commit_of_the_line_stands_in_for_a_damaged_head(store: Path) -> None:
    builder = Builder(store)
    first = simple(builder, 1)
    simple(builder, 2)
    simple(builder, 3)
    builder.rollback(first)  # 4; 2 and 3 are left behind
    fifth = simple(builder, 5)
    head = simple(builder, 6)
    for path in (store / "man").glob(f"00000001-{head:012x}*"):
        path.unlink()
    segment = store / f"seg/00000001-{fifth:012x}.r0000.0000"
    segment.write_bytes(segment.read_bytes() + b"\0")
    report = rescue.Report()
    assert value(store, report=report) == 1
    assert len(report.problems) == 2
    assert f"commit {head} " in report.problems[0]
    assert f"man/00000001-{head:012x}.r0000: no copy" in report.problems[0]
    assert f"commit {fifth} " in report.problems[1]
    assert f"seg/00000001-{fifth:012x}.r0000.0000 does not have 8192 bytes" in report.problems[1]
    with pytest.raises(rescue.Damage, match="does not have"):
        rescue.read(store)
    with pytest.raises(rescue.Damage, match="no copy"):
        rescue.read(store, commit=head, report=rescue.Report())
    assert [value(store, commit=txid) for txid in (fifth, 3, 2)] == [5, 3, 2]  # asked for by name, it is read
    (store / f"seg/00000001-{first:012x}.r0000.0000").unlink()
    report = rescue.Report()
    assert value(store, report=report) == 5  # none is whole any more: the newest that can be read
    assert len(report.problems) == 4


@pytest.mark.parametrize("kinds", [None, [RAW, LZ4, ZSTD, ZSTD]])
def test_a_damaged_page_is_reported(store: Path, kinds: list[int] | None, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(store)
    chunks = {"model/w": array(WEIGHT, kinds=kinds), "p": array(BIAS, pack="p"), "q": array(BIAS, pack="p")}
    root = {"d": {"model": {"d": {"w": tensor("model/w", [300, 200])}}, "p": tensor("p", [50]), "q": tensor("q", [50])}}
    builder.commit(chunks, root)
    report = rescue.Report()
    name, offset = builder.place["model/w", 2]
    flip(store / name, offset + 5000)
    assert set(rescue.read(store, report=report)) == {"p", "q"}
    assert len(report.problems) == 1
    commit = rescue.commits(store)[0]
    line = f"commit 1 ({commit.id}), key 'model/w': page 2, {name}, offset {offset}: the stored bytes do not match"
    assert report.problems[0].startswith(line)
    with pytest.raises(rescue.Damage):
        rescue.read(store)
    out = store.with_name("out.safetensors")
    assert main([str(store), "--to", str(out)]) == 1
    assert line in capsys.readouterr().err
    assert set(file_of(out)) == {"p", "q"}
    with safetensors.safe_open(out, "np") as file:
        assert json.loads(file.metadata()["tierload.skipped"]) == report.problems
    (store / name).unlink()
    report = rescue.Report()
    assert rescue.read(store, report=report) == {}
    assert [("'p'" in line, "missing, too short" in line) for line in report.problems] == [
        (False, True),
        (True, True),
        (False, True),
    ]


def test_one_wrong_byte_anywhere_never_gives_wrong_data(store: Path) -> None:
    builder = Builder(store)
    chunks = {
        "a": array(WEIGHT[:90], kinds=[RAW, ZSTD, LZ4, ZSTD], rotate=True),
        "b": array(STEPS[:900]),
        "c": array(BIAS, pack="p"),
        "d": array(BIAS[:3], pack="p"),
    }
    builder.commit(chunks, {"d": {key: tensor(key, chunk.sizes) for key, chunk in chunks.items()}})
    simple(builder, 1)
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
    chance = random.Random(11)
    lost = 0
    for number in range(300):
        path = files[number % len(files)]
        used = len(path.read_bytes().rstrip(b"\0"))
        at = chance.randrange(used)
        flip(path, at)
        report = rescue.Report()
        found = rescue.read(store, commit=1, report=report)
        assert all(found[key][2] == chunks[key].data for key in found)
        assert bool(report.problems) == (set(found) != set(chunks)), (path, at)
        lost += len(chunks) - len(found)
        flip(path, at)
    assert lost > 10


def test_super_slots(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(store)
    simple(builder, 1)
    good = (store / "SUPER").read_bytes()
    flip(store / "SUPER", 50)  # generation 2, the newer one
    assert value(store) == 1
    flip(store / "SUPER", 4096 + 50)
    report = rescue.Report()
    assert value(store, report=report) == 1
    assert "SUPER: both slots" in report.problems[0]
    assert main([str(store), "--list"]) == 1
    (store / "SUPER").write_bytes(good)
    builder.super(4, (1, 0), version=2, release=b"3.1.0")
    with pytest.raises(rescue.Refused, match=r"tierload 3\.1\.0"):
        rescue.read(store)
    builder.super(6, (1, 0), features=4)
    assert main([str(store), "--list"]) == 2
    builder.super(8, (1, 1))  # a base that is not there
    report = rescue.Report()
    assert value(store, report=report) == 1
    assert "SUPER's base" in report.problems[0]


def test_a_store_without_any_journal(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(store)
    builder.super(4, (0, 0))
    builder.paths()[0].unlink()
    builder.paths()[1].write_bytes(bytes(4096))
    assert rescue.commits(store) == []
    with pytest.raises(rescue.Refused, match="has no commit"):
        rescue.read(store)
    assert main([str(store), "--list"]) == 0
    assert "journal 00000001-00000000: no valid header" in capsys.readouterr().err
    (store / "SUPER").write_bytes(b"")
    with pytest.raises(rescue.Damage, match="no complete journal"):
        rescue.commits(store)


def test_padding_that_is_not_zero_is_a_note(store: Path) -> None:
    builder = Builder(store)
    builder.commit(
        {"a": array(BIAS), "b": array(STEPS[:512])}, {"d": {"a": tensor("a", [50]), "b": tensor("b", [512])}}
    )
    report = rescue.Report()
    assert len(rescue.read(store, report=report)) == 2
    assert not report.notes
    name, offset = builder.place["a", 0]
    flip(store / name, offset + 4095)
    assert set(rescue.read(store, report=report)) == {"a", "b"}
    assert not report.problems
    assert "offset 0: what follows it up to the next block is not zero" in report.notes[0]


def test_an_interrupted_open_is_passed_over(store: Path) -> None:
    builder = Builder(store)
    simple(builder, 1)
    saved = [(path, path.read_bytes()) for path in builder.paths()]
    builder.roll(epoch=2)
    for path in builder.paths():
        os.truncate(path, builder.where[builder.lsn - 1][0] + 40)
    assert value(store) == 1
    for path in builder.paths():
        path.write_bytes(b"")
    (store / "wal/c-00000009-00000000.tmp").write_bytes(saved[0][1])
    (store / "wal/c-00000009-00000000").write_bytes(saved[0][1])  # a name that its header does not have
    assert value(store) == 1
    for path, _ in saved:
        path.unlink()
    assert main([str(store), "--list"]) == 1


def test_unknown_records(store: Path) -> None:
    builder = Builder(store)
    simple(builder, 1)
    builder.record(9, b"later", flags=0x80)
    builder.record(7, b"heat", flags=0x80)
    simple(builder, 2)
    assert value(store) == 2
    held = dict(vars(builder), bytes=bytearray(builder.bytes))
    for kind in (6, 7, 9):
        vars(builder).update(held, bytes=bytearray(held["bytes"]))
        builder.record(kind, b"later")
        with pytest.raises(rescue.Refused, match=f"unknown type {kind}"):
            rescue.read(store)


def test_records_that_lie_stop_the_replay(store: Path) -> None:
    builder = Builder(store)
    simple(builder, 1)
    builder.record(4, struct.pack("<QQII", 0, 1, 1 << 31, 0))
    report = rescue.Report()
    assert value(store, report=report) == 1
    assert "corrupt from LSN 3" in report.problems[0]


def test_hostile_views_and_counts(store: Path) -> None:
    builder = Builder(store)
    root = {
        "a": tensor("a", [1 << 40], stride=[0]),
        "b": tensor("a", [50, 1 << 62], stride=[1, 1 << 62]),
        "c": tensor("a", [2], stride=[-1], offset=1),
        "d": tensor("a", [51]),
        "e": tensor("a", [1], offset=50),
        "f": tensor("a", [1], dtype="float7"),
        "g": {"t": {"chunk": 7, "shape": [1]}},
        "h": {"t": {"chunk": [], "shape": [1]}},
        "i": {"t": {"chunk": 0}},
        "j": {"t": 5},
        "k": {"map": [1]},
        "l": tensor("a", [True]),
        "ok": tensor("a", [1] * 30, stride=[1 << 60] * 30),
    }
    builder.commit({"a": array(BIAS)}, {"d": root})
    report = rescue.Report()
    tracemalloc.start()
    assert set(rescue.read(store, report=report)) == {"ok"}
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert len(report.problems) == 12
    builder.commit({"a": array(BIAS)}, None, document='{"version": 1, "root": ' + "[" * 100_000 + "]" * 100_000 + "}")
    report = rescue.Report()
    assert set(rescue.read(store, report=report)) == {"a"}
    assert "not readable" in report.problems[0]


def test_many_views_of_one_chunk_are_bounded(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SPARE", 900 - 16 * (64 << 10))
    Builder(store).commit({"#0": array(BIAS)}, [tensor("#0", [50])] * 9)
    report = rescue.Report()
    assert len(rescue.read(store, report=report)) == 8
    assert "far larger" in report.problems[0]


def test_a_manifest_that_was_tampered_with_is_never_more_than_damage(store: Path) -> None:
    chance = random.Random(3)
    outcomes = {"fine": 0, "damage": 0}
    builder = Builder(store)
    simple(builder, 0)

    def tamper(body: bytearray) -> None:
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(body)) if chance.random() < 0.7 else chance.randrange(64, 176)
            body[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])

    for _ in range(150):
        again = Builder.__new__(Builder)
        vars(again).update(vars(builder))
        again.entries, again.pages, again.place = dict(builder.entries), {}, {}
        again.bytes, again.tamper = bytearray(builder.bytes), tamper
        chunks = {"a": array(STEPS[:300]), "b": array(BIAS, kinds=[LZ4, ZSTD]), "c": array(BIAS[:3], pack="p")}
        root = {"d": {"a": tensor("a", [300]), "b": tensor("b", [50]), "c": tensor("c", [3], stride=[1], offset=0)}}
        again.commit(chunks, root)
        report = rescue.Report()
        try:
            rescue.read(store, commit=2, report=report)
        except rescue.Damage:
            outcomes["damage"] += 1
        else:
            outcomes["damage" if report.problems else "fine"] += 1
    assert min(outcomes.values()) > 5
