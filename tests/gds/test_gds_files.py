"""Pages between files and memory: the right bytes, few tasks, and nothing under way once a call has ended."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tierload.errors import InvalidRequest, StoreIOError
from tierload.gds import Extent, GdsFiles, availability
from tierload.gds.tuning import TASK_BYTES

PAGE = 4096
MIB = 1 << 20


class Memory:
    """Memory of the host, which the fake takes for a GPU's."""

    def __init__(self, nbytes: int, content: bytes = b"") -> None:
        self._buffer = ctypes.create_string_buffer(content, nbytes)
        self.pointer = ctypes.addressof(self._buffer)

    def extent(self, offset: int, at: int, nbytes: int) -> Extent:
        return Extent(offset, self.pointer + at, nbytes)

    @property
    def bytes(self) -> bytes:
        return self._buffer.raw


@pytest.fixture(autouse=True)
def clean(kvikio: ModuleType) -> Iterator[None]:
    """After each test: files are closed, with no task under way, and kvikio is set as it was."""
    yield
    opened = [event for event in kvikio.log if event[0] == "open"]
    assert [event for event in kvikio.log if event[0] == "close"] == [("close", 0)] * len(opened)
    assert kvikio.defaults.settings == kvikio.defaults.FIRST


def tasks(kvikio: ModuleType) -> list[tuple[int, int]]:
    return [event[1:] for event in kvikio.log if event[0] in ("read", "write")]


def test_pages_come_and_go_bit_for_bit(kvikio: ModuleType, tmp_path: Path) -> None:
    content = os.urandom(5 * PAGE + 1234)
    path = tmp_path / "segment"
    path.write_bytes(bytes(8 * PAGE))
    source, target = Memory(len(content), content), Memory(len(content))
    # The last page is a short one, and the file has gaps that memory has not.
    places = [(0, 0, PAGE), (2 * PAGE, PAGE, PAGE), (3 * PAGE, 2 * PAGE, len(content) - 2 * PAGE)]
    with GdsFiles() as files:
        files.write(path, [source.extent(*place) for place in places])
        files.read(str(path), (target.extent(*place) for place in reversed(places)))
        files.read(path, [])
        assert files.path == "compat (no nvidia-fs)"
        assert kvikio.defaults.settings["num_threads"] == 8
    assert target.bytes == content
    assert path.read_bytes()[PAGE : 2 * PAGE] == bytes(PAGE)
    assert path.stat().st_size == 8 * PAGE
    assert [event[1:] for event in kvikio.log if event[0] == "open"] == [("r+", 1), ("r", 1)]


def test_the_way_is_what_it_says(kvikio: ModuleType, tmp_path: Path) -> None:
    availability._DRIVER.mkdir()
    path = tmp_path / "segment"
    path.write_bytes(bytes(PAGE))
    memory = Memory(PAGE)
    with GdsFiles() as files:
        files.read(path, [memory.extent(0, 0, PAGE)])
        assert files.path == "gds"
    assert kvikio.log[0] == ("open", "r", kvikio.CompatMode.OFF)  # it raises rather than take another way


def test_neighbours_in_file_and_memory_are_one_task(kvikio: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(64 * PAGE))
    memory = Memory(64 * PAGE)
    with GdsFiles() as files:
        files.read(path, [memory.extent(page * PAGE, page * PAGE, PAGE) for page in (2, 0, 1, 3)])
        assert tasks(kvikio) == [(0, 4 * PAGE)]
        kvikio.log[1:] = []
        # Neighbours in the file only, in memory only, and after a short page.
        places = [(8 * PAGE, 8 * PAGE, PAGE), (9 * PAGE, 10 * PAGE, PAGE), (11 * PAGE, 11 * PAGE, 5)]
        files.read(path, [memory.extent(*place) for place in [*places, (12 * PAGE, 11 * PAGE + 5, PAGE)]])
        assert tasks(kvikio) == [(8 * PAGE, PAGE), (9 * PAGE, PAGE), (11 * PAGE, 5), (12 * PAGE, PAGE)]


def test_large_runs_are_many_tasks(kvikio: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    nbytes = 2 * TASK_BYTES + 3 * PAGE
    path.write_bytes(os.urandom(nbytes + PAGE))
    memory = Memory(nbytes)
    with GdsFiles() as files:
        files.read(path, [memory.extent(PAGE + at, at, MIB) for at in range(0, 2 * TASK_BYTES, MIB)])
        files.read(path, [memory.extent(PAGE + 2 * TASK_BYTES, 2 * TASK_BYTES, 3 * PAGE)])
    starts = [PAGE, PAGE + TASK_BYTES, PAGE + 2 * TASK_BYTES]
    assert tasks(kvikio) == list(zip(starts, [TASK_BYTES, TASK_BYTES, 3 * PAGE], strict=True))
    assert memory.bytes == path.read_bytes()[PAGE:]


@pytest.mark.parametrize("wrong", [Extent(512, 4096, 10), Extent(-4096, 4096, 10), Extent(0, 4096, 0), Extent(0, 0, 9)])
def test_what_is_no_page_is_refused_before_anything_moves(kvikio: ModuleType, tmp_path: Path, wrong: Extent) -> None:
    memory = Memory(PAGE)
    with GdsFiles() as files, pytest.raises(InvalidRequest, match=r"segment is no page.*multiple of 4096"):
        files.write(tmp_path / "segment", [memory.extent(0, 0, PAGE), wrong])
    assert kvikio.log == []


def test_a_file_that_ends_early(kvikio: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(PAGE + 100))
    memory = Memory(4 * PAGE)
    extents = [memory.extent(0, 0, PAGE), memory.extent(PAGE, 2 * PAGE, PAGE)]
    with GdsFiles() as files, pytest.raises(StoreIOError, match=r"bytes 4096 to 8192: POSIX.*EOF; .*verify") as caught:
        files.read(path, extents)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_a_short_read_is_an_error_and_waits_for_the_others(
    kvikio: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(100 * PAGE))
    memory = Memory(100 * PAGE)
    done: list[int] = []

    def cut(kind: str, offset: int, nbytes: int) -> int:
        if offset == 0:
            return nbytes - 1
        last.wait(5)
        done.append(offset)
        return nbytes

    last = threading.Event()
    threading.Timer(0.05, last.set).start()
    monkeypatch.setattr(kvikio, "on_task", cut)
    extents = [memory.extent(page * PAGE, page * PAGE, PAGE) for page in range(0, 20, 2)]
    with GdsFiles() as files:
        with pytest.raises(StoreIOError, match="did not read bytes 0 to 4096: 4095 bytes of 4096; check the store"):
            files.read(path, extents)
        assert sorted(done) == [page * PAGE for page in range(2, 20, 2)]
        monkeypatch.setattr(kvikio, "on_task", None)
        files.read(path, extents)  # and it can be used again


@pytest.mark.parametrize(
    ("said", "code", "advice"),
    [
        ("KvikIO failure at: /x/posix_io.hpp:99: POSIX error on pwrite: No space left on device", errno.ENOSPC, "room"),
        ("CUDA error at: /x/y.cpp:9: CUDA_ERROR_INVALID_VALUE(invalid argument)", errno.EIO, "look at the disk"),
        ("KvikIO failure at: /x/y.hpp:9: POSIX error on pwrite: Input/output error", errno.EIO, "look at the disk"),
        ("", errno.EIO, "RuntimeError"),
    ],
)
def test_errors_have_the_number_of_what_they_quote(
    kvikio: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, advice: str
) -> None:
    path = tmp_path / "segment"
    path.touch()

    def fail(kind: str, offset: int, nbytes: int) -> int:
        raise RuntimeError(said)

    monkeypatch.setattr(kvikio, "on_task", fail)
    memory = Memory(2 * TASK_BYTES)
    with GdsFiles() as files, pytest.raises(StoreIOError, match=advice) as caught:
        files.write(path, [memory.extent(0, 0, 2 * TASK_BYTES)])
    assert caught.value.errno == code
    assert "/x/" not in str(caught.value)


def test_a_file_that_is_not_there(kvikio: ModuleType, tmp_path: Path) -> None:
    memory = Memory(PAGE)
    with GdsFiles() as files, pytest.raises(StoreIOError, match=r"4096: Unable to open file\. No such file") as caught:
        files.write(tmp_path / "gone", [memory.extent(0, 0, PAGE)])
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "gone").exists()


def test_a_task_that_cannot_be_started(kvikio: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(8 * PAGE))
    memory = Memory(8 * PAGE)
    start = kvikio.CuFile.pread

    def refuse(self: object, buf: object, size: int, offset: int, task_size: int) -> object:
        if offset == 4 * PAGE:
            raise ValueError("Size is greater than the size of the buffer")
        return start(self, buf, size, offset, task_size)

    monkeypatch.setattr(kvikio.CuFile, "pread", refuse)
    with GdsFiles() as files, pytest.raises(StoreIOError, match="bytes 16384 to 20480: Size is greater"):
        files.read(path, [memory.extent(page * PAGE, page * PAGE, PAGE) for page in (0, 2, 4, 6)])
    assert tasks(kvikio) == [(0, PAGE), (2 * PAGE, PAGE)]


def test_an_interrupt_waits_for_what_is_under_way(
    kvikio: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(8 * PAGE))
    memory = Memory(8 * PAGE)
    get = kvikio.IOFuture.get
    calls: list[object] = []

    def interrupted(self: object) -> int:
        calls.append(self)
        moved: int = get(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(kvikio.IOFuture, "get", interrupted)
    with GdsFiles() as files:
        with pytest.raises(KeyboardInterrupt):
            files.read(path, [memory.extent(page * PAGE, page * PAGE, PAGE) for page in (0, 2, 4, 6)])
        assert len(set(map(id, calls))) == 4


def test_two_at_a_time_share_the_threads(kvikio: ModuleType) -> None:
    first, second = GdsFiles(), GdsFiles()
    with first:
        second.__enter__()
    assert kvikio.defaults.settings["num_threads"] == 8
    second.__exit__(None, None, None)


def test_who_has_set_more_threads_keeps_them(kvikio: ModuleType) -> None:
    with kvikio.defaults.set({"num_threads": 32}):
        with GdsFiles():
            assert kvikio.defaults.settings["num_threads"] == 32
        assert kvikio.defaults.settings["num_threads"] == 32
