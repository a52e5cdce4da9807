"""``tierload bench``: that every way is there, and durable, late or refused, not how fast it is."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.cli.support import run, run_json
from tierload import _native
from tierload.engine import pacing
from tierload.errors import InvalidRequest, StoreIOError

DURABLE = {
    "posix",
    "posix-append",
    "direct-dsync",
    "ring-linked",
    "ring-linked-direct",
    "ring-direct-dsync",
    "store-record",
}


def test_every_way_is_measured_or_refused_with_a_reason(tmp_path: Path) -> None:
    found = run_json("bench", "wal", tmp_path, "-n", 7)
    assert found["path"] == str(tmp_path)
    assert found["records"] == 7
    assert {"kernel", "processor", "load", "file system", "device's cache"} == found["facts"].keys()
    for size in (64, 4096):
        ways = {way["way"]: way for way in found["ways"] if way["record_bytes"] == size}
        assert {name for name, way in ways.items() if way["durable"]} == DURABLE
        assert ways.keys() - DURABLE == {"write-alone"}
        assert ways["posix"]["ratio"] == 1
        for way in ways.values():
            if way["refused"]:
                assert way["mean"] is way["p50"] is way["p99"] is way["ratio"] is None
            else:
                assert 0 < way["p50"] <= way["p99"]
                assert way["mean"] > 0
                assert way["ratio"] > 0
        assert not ways["posix"]["refused"]
        assert not ways["store-record"]["refused"]
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_a_line_for_each_way(tmp_path: Path) -> None:
    text = run("bench", "wal", tmp_path, "-n", 1)
    assert text.count("pwrite, fdatasync ") == 2
    assert text.count("Store.record") == 2
    assert text.count("not durable") == 2
    assert "a record of 64 B" in text
    assert "a record of 4.0 KiB" in text


def test_what_is_refused_is_shown_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _native.record_writer

    def refusing(path: str, **way: object) -> _native.RecordWriter:
        if way["ring"]:
            raise StoreIOError(errno.EPERM, "io_uring_setup: Operation not permitted", path)
        return made(path, **way)  # type: ignore[arg-type]

    monkeypatch.setattr(_native, "record_writer", refusing)
    lines = [line for line in run("bench", "wal", tmp_path, "-n", 2).splitlines() if line.startswith("io_uring")]
    assert len(lines) == 6
    assert all(line.endswith("-  io_uring_setup: Operation not permitted") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written() -> None:
    assert run("bench", "wal", "/proc", code=5) == ""
    assert run("bench", "wal", "/not/there", code=5) == ""


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_records_lie_one_after_the_other(tmp_path: Path, ring: bool, grows: bool) -> None:
    if ring and _native.io_uring_refusal():
        pytest.skip(_native.io_uring_refusal())
    path = tmp_path / "file"
    way = {"flush": "after", "grows": grows, "direct": False, "ring": ring, "record_bytes": 16}
    writer = _native.record_writer(str(path), **way, records=3)
    assert path.stat().st_size == (16 if grows else 64)
    assert len(writer.write(2)) == 2
    with pytest.raises(InvalidRequest, match="more records than were announced"):
        writer.write(2)
    offsets = [int.from_bytes(path.read_bytes()[at : at + 16], "little") for at in (0, 16, 32)]
    assert offsets == [0, 16, 32]
    with pytest.raises(StoreIOError, match="open"):
        _native.record_writer(str(path), **way, records=3)


def test_pacing_shows_every_size_and_interval(tmp_path: Path) -> None:
    found = run_json("bench", "pacing", tmp_path, "--bytes", "3MiB", "-n", 2)
    assert found["path"] == str(tmp_path)
    assert (found["bytes"], found["rounds"]) == (3 << 20, 2)
    assert [way["segment_mib"] for way in found["sizes"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [way["interval_ms"] for way in found["intervals"]] == [20, 50, 100, 250]
    for way in found["sizes"] + found["intervals"]:
        assert 0 < way["mean"] <= way["max"]
        assert way["p99"] <= way["max"]
        assert 0 <= way["late"] <= way["segments"]
        assert way["share"] == pytest.approx(way["rate"] / found["best"])
        assert 0 < way["share"] <= 1
    assert [way["segments"] for way in found["sizes"]] == [6, 4] + [2] * 7  # of two saves
    assert all(way["late"] == 0 for way in found["sizes"])
    assert found["best"] == max(found["device"], *(way["rate"] for way in found["sizes"] + found["intervals"]))
    assert list(tmp_path.iterdir()) == []


def test_pacing_prints_two_tables_and_a_reference(tmp_path: Path) -> None:
    lines = run("bench", "pacing", tmp_path, "-b", "1MiB", "-n", 1).splitlines()
    assert sum(" MiB  " in line and line.endswith("%") for line in lines) == 9
    assert sum(" of 1  " in line for line in lines) == 4
    assert lines[-1].startswith("published for another machine")


def test_pacing_takes_less_where_less_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=300 << 20))
    assert pacing.bytes_that_fit(tmp_path) == 150 << 20
    assert pacing.bytes_that_fit(tmp_path, 200 << 20) == 200 << 20
    with pytest.raises(StoreIOError, match="300,000,000 bytes needs 367,108,864 free"):
        pacing.bytes_that_fit(tmp_path, 300_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    assert run("bench", "pacing", tmp_path, code=5) == ""
    assert list(tmp_path.iterdir()) == []
    assert run("bench", "pacing", tmp_path, "-b", "much", code=2) == ""
    assert run("bench", "pacing", "/not/there", code=5) == ""
