"""Which way data takes: past the page cache or through it, compressed or not, and that the store says so."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierload
from tierload import Settings, _native
from tierload.engine import devices
from tierload.errors import StoreIOError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is remembered of devices is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tierload" / "devices.json"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def state(mebibytes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {str(number): torch.randn(MIB // 4, generator=generator) for number in range(mebibytes)}


def dropped(store: Path) -> int:
    """Takes the segments out of the page cache; returns their bytes."""
    total = 0
    for segment in (store / "seg").iterdir():
        with segment.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        total += segment.stat().st_size
    return total


def same(a: object, b: dict[str, torch.Tensor]) -> bool:
    assert isinstance(a, dict)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize("compression", ["off", "fast"])
def test_large_data_goes_past_the_page_cache_and_comes_back(disk: Path, compression: str) -> None:
    saved = state(40)
    path = disk / "store"
    settings = Settings(compression=compression, max_segment_size_mb=16)  # type: ignore[arg-type]
    with tierload.Store(path, mode="w", settings=settings) as store:
        report = store.save(saved)
        assert report.commit.io == "direct"
        last = 16 * MIB  # less than 8 MiB are left for the last segment, perhaps
        assert report.written_bytes - last < store._native.direct_bytes <= report.written_bytes
        assert same(store.load(), saved)
        assert store.verify(full=True).ok
    stored = dropped(path)
    with tierload.open(path) as reader:
        assert same(reader.load(), saved)
        read = reader._native.direct_bytes
    assert stored <= read <= 1.02 * stored


def test_a_cold_load_of_some_keys_reads_no_more_than_their_pages(disk: Path) -> None:
    saved = state(64)
    path = disk / "store"
    with tierload.Store(path, mode="w", settings=Settings(compression="off")) as store:
        store.save(saved)
    dropped(path)
    with tierload.open(path) as reader:
        got = reader.load(keys=[str(number) for number in range(0, 64, 4)])
        assert isinstance(got, dict)
        assert torch.equal(got["4"], saved["4"])
        assert 16 * MIB <= reader._native.direct_bytes <= 1.02 * 16 * MIB


def test_what_is_warm_is_read_out_of_the_page_cache(disk: Path) -> None:
    saved = state(16)
    path = disk / "store"
    with tierload.Store(path, mode="w", settings=Settings(io="buffered")) as store:
        assert store.save(saved).commit.io == "buffered: it was asked for"
    with tierload.open(path) as reader:
        assert same(reader.load(), saved)
        assert reader._native.direct_bytes == 0


def test_small_data_goes_through_the_page_cache(disk: Path) -> None:
    with tierload.Store(disk / "store", mode="w") as store:
        assert store.save(state(1)).commit.io == "buffered"


def test_memory_has_no_direct_way_and_auto_chooses_raw(memory: Path) -> None:
    saved = state(16)
    with tierload.Store(memory / "store", mode="w") as store:
        report = store.save(saved)
        assert report.compression == "off"
        assert report.commit.io == "buffered: the file system keeps its files in memory"
        assert same(store.load(), saved)


@pytest.mark.parametrize(("rate", "chosen"), [(1e6, "fast"), (1e15, "off")])
def test_auto_compresses_where_encoding_outruns_the_device(
    disk: Path, monkeypatch: pytest.MonkeyPatch, rate: float, chosen: str
) -> None:
    monkeypatch.setattr(devices, "remembered", lambda path: devices.Device(write=rate, read=rate))
    with tierload.Store(disk / "store", mode="w") as store:
        assert store.save(state(4)).compression == chosen


def test_the_device_is_measured_before_the_first_large_save_and_remembered(
    disk: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    rates = _native.calibrate(str(disk), 0.1)
    monkeypatch.setattr(devices, "measure", lambda path: measured.append(path) or rates)
    monkeypatch.setattr("tierload.engine.writing._MEASURE_FROM", 2 * MIB)
    with tierload.Store(disk / "store", mode="w") as store:
        store.save(state(1))
        assert not measured
        store.save(state(3))
        store.save(state(4, seed=1))
    assert len(measured) == 1
    assert own_memory.exists()
    found = devices.remembered(disk)
    assert found is not None
    assert found.write == max(rate.write for rate in rates) > 0
    assert found.read == max(rate.read for rate in rates) > 0
    assert {rate.direct for rate in rates} == {False, True}


def test_a_disk_that_cannot_be_measured_is_saved_to_all_the_same(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: object) -> None:
        raise StoreIOError(errno.ENOSPC, "write: No space left on device", "calibration")

    monkeypatch.setattr(devices, "measure", full)
    monkeypatch.setattr("tierload.engine.writing._MEASURE_FROM", MIB)
    saved = state(2)
    with tierload.Store(disk / "store", mode="w") as store:
        store.save(saved)
        assert same(store.load(), saved)


FORGED = [
    3,
    {"write": "fast", "read": 1.0},
    {"write": -1.0, "read": 1.0},
    {"write": 1.0, "read": 1.0, "block_bytes": 0},
    {"write": 1.0, "read": 1.0, "depth": 10**6},
    {"write": 1.0, "read": 1.0, "depth": 2.5},
    {"write": 1.0, "read": 1.0, "colour": "red"},
]


@pytest.mark.parametrize("content", ["", "[]", "{", *FORGED], ids=str)
def test_a_memory_that_cannot_be_read_is_measured_again(disk: Path, own_memory: Path, content: object) -> None:
    own_memory.parent.mkdir(parents=True)
    own_memory.write_text(content if isinstance(content, str) else json.dumps({devices._name(disk): content}))
    assert devices.remembered(disk) is None
    devices.remember(disk, _native.calibrate(str(disk), 0.05))
    assert devices.remembered(disk) is not None


def test_calibration_leaves_nothing_behind(disk: Path) -> None:
    before = sorted(disk.iterdir())
    devices.measure(disk)
    assert sorted(disk.iterdir()) == before


REFUSED = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
# seccomp: io_uring_setup (425) gives EPERM, as containers do it
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
header = struct.pack("HxxxxxxP", 4, ctypes.addressof(program))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, header, 0, 0) == 0
import torch, tierload
saved = {str(n): torch.full((1 << 18,), float(n)) + torch.arange(1 << 18) for n in range(16)}
with tierload.Store(sys.argv[1], mode="w") as store:
    print(store.save(saved).commit.io)
    assert all(torch.equal(v, saved[k]) for k, v in store.load().items())
"""


def test_a_sandbox_that_refuses_io_uring_is_stepped_down_for(disk: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(disk / "store")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "buffered: io_uring is refused: Operation not permitted"


def test_a_forked_child_reads_without_its_parents_ring(disk: Path) -> None:
    saved = state(16)
    path = disk / "store"
    with tierload.Store(path, mode="w", settings=Settings(compression="off")) as store:
        store.save(saved)
        dropped(path)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with tierload.open(path) as reader:
                    got = reader.load()  # compared without torch, whose threads did not survive the fork
                code = 0 if all(got[key].numpy().tobytes() == saved[key].numpy().tobytes() for key in saved) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(store.load(), saved)
