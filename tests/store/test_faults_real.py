"""Faults that the kernel makes: a disk that is really full, limits, a read-only place, signals, too few descriptors."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.state.alike import assert_alike
from tests.store.ondisk import files_of
from tests.store.support import SMALL, Outcome, in_child, make_sample, writer
from tierload import StoreIOError, StoreNotFound, _native

SMALL_STATE = {"w": torch.arange(500, dtype=torch.float32), "step": 1}


def noise(kib: int, seed: int = 0) -> dict[str, Any]:
    """A state that does not compress."""
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randint(0, 256, (kib << 10,), generator=generator, dtype=torch.uint8), "seed": seed}


def run(body: Callable[[], Any], seconds: int = 30) -> Any:
    outcome: Outcome = in_child(body, seconds=seconds)
    assert not outcome.error, outcome.trace
    assert not outcome.signal, f"signal {outcome.signal}"
    return outcome.value


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def data_files(store: Path) -> set[str]:
    return {file for file in files_of(store) if file.startswith(("seg/", "man/"))}


def test_a_full_disk(disk: Path) -> None:
    """The error says what is needed and what is free, nothing partial stays, and the next save in the process works."""
    store = disk / "store"
    size = 4 << 20

    def body() -> None:
        tierload.save(SMALL_STATE, store, step=1, settings=SMALL)
        for step in (3, 4, 5):
            before, held = data_files(store), tierload.load(store)
            with pytest.raises(StoreIOError) as found:
                tierload.save(noise(size >> 10), store, step=2)
            error = found.value
            assert error.errno == errno.ENOSPC
            assert str(error.filename).startswith(str(store))
            numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]{3,}", str(error))]
            assert any(abs(number - size) < 4096 for number in numbers), f"not what is needed: {error}"
            assert any(0 < number < 1 << 20 for number in numbers), f"not what is free: {error}"
            del error, found
            assert data_files(store) == before, "partial files stay"
            assert_alike(tierload.load(store), held)
            tierload.save({**SMALL_STATE, "step": step}, store, step=step)

    run(body)
    with tierload.open(store) as reader:
        assert [commit.step for commit in reader.commits()] == [5, 4, 3, 1]
        assert reader.verify(full=True).ok


def test_a_disk_that_fills_up_bit_by_bit_and_is_freed(disk: Path) -> None:
    """One writer, small saves until nothing fits, whichever file it is that does not; then it goes on."""
    store = disk / "store"

    def body() -> int:
        failures = 0
        with writer(store) as held:
            held.save(SMALL_STATE, step=0)
            kept = [0]
            for filler in (700, 300, 120, 48, 20, 8, 4, 1):
                (disk / "filler").write_bytes(b"")
                free = os.statvfs(disk)
                room = free.f_bavail * free.f_frsize
                (disk / "filler").write_bytes(bytes(max(0, room - (filler << 10))))
                for number in range(30):
                    step = kept[-1] + 1
                    try:
                        held.save(noise(16, seed=step), step=step)
                        kept.append(step)
                    except StoreIOError as error:
                        failures += error.errno == errno.ENOSPC
                        break
                    if number % 3 == 0:
                        held.record("lr", number)
                os.truncate(disk / "filler", 0)
                held.collect(keep=2)
                kept = kept[-2:]
                with tierload.open(store, settings=SMALL) as reader:
                    assert [commit.step for commit in reader.commits()] == kept[::-1]
                    for step in kept:
                        if step:
                            assert_alike(reader.load(step=step), noise(16, seed=step))
                    assert reader.verify(full=True).ok
        return failures

    assert run(body) >= 6


def test_saving_again_inside_the_handler(disk: Path) -> None:
    """Free some space and try again: what a training script does while it handles the error."""
    store = disk / "store"

    def body() -> None:
        tierload.save(SMALL_STATE, store, step=1, settings=SMALL)
        (disk / "filler").write_bytes(bytes(500 << 10))
        try:
            tierload.save(noise(512), store, step=2)
        except StoreIOError as error:
            (disk / "filler").unlink()
            if error.errno == errno.ENOSPC:
                tierload.save(noise(512), store, step=2)
        assert_alike(tierload.load(store), noise(512))

    run(body)


def test_a_writer_that_failed_is_let_go_while_its_error_is_kept(ram: Path) -> None:
    """An error that somebody collected must not keep the store locked by its traceback."""

    def body() -> None:
        faults = _native.Faults()
        store = writer(ram / "store", _faults=faults)
        store.save(SMALL_STATE, step=1)
        faults.arm(at=1, kind="fail", code=errno.EIO, op="sync")
        with pytest.raises(StoreIOError) as kept:
            store.save(noise(4), step=2)
        store.close()
        with writer(ram / "store") as again:
            again.save(noise(4), step=2)
        assert kept.value.errno == errno.EIO

    run(body)


def test_a_limit_on_file_sizes(ram: Path) -> None:
    """EFBIG, after a write that was cut short."""
    store = ram / "store"

    def body() -> None:
        tierload.save(SMALL_STATE, store, step=1, settings=SMALL)
        before = data_files(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, -1))
        with pytest.raises(StoreIOError) as found:
            tierload.save(noise(1000), store, step=2)
        assert found.value.errno == errno.EFBIG
        assert "/seg/" in str(found.value.filename)
        del found
        assert data_files(store) == before
        tierload.save({**SMALL_STATE, "step": 3}, store, step=3)

    run(body)
    assert_alike(tierload.load(store), {**SMALL_STATE, "step": 3})
    assert tierload.open(store).verify(full=True).ok


def as_nobody(body: Callable[[], Any]) -> Callable[[], Any]:
    """Root may write anywhere, so these children are nobody."""

    def wrapped() -> Any:
        os.setegid(65534)
        os.seteuid(65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self belongs to root
        return body()

    return wrapped


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
def test_a_store_that_may_only_be_read(ram: Path) -> None:
    sample = make_sample(ram / "store")
    os.chmod(ram, 0o755)
    for path in [sample.path, *sample.path.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def body() -> None:
        assert_alike(tierload.load(sample.path), sample.contents[sample.head])
        with tierload.open(sample.path, settings=SMALL) as store:
            assert store.verify(full=True).ok
        for attempt in (lambda: tierload.save(SMALL_STATE, sample.path), lambda: tierload.rollback(sample.path, 1)):
            with pytest.raises(StoreIOError) as found:
                attempt()
            assert found.value.errno == errno.EACCES
            assert str(found.value.filename).startswith(str(sample.path))
        with pytest.raises(StoreIOError) as found:
            tierload.save(SMALL_STATE, ram / "new")
        assert found.value.errno == errno.EACCES
        assert str(ram / "new") in str(found.value)

    run(as_nobody(body))
    assert_alike(tierload.load(sample.path), sample.contents[sample.head])


def test_a_file_system_that_is_mounted_read_only(disk: Path) -> None:
    sample = make_sample(disk / "store")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert_alike(tierload.load(sample.path), sample.contents[sample.head])
    assert tierload.open(sample.path).verify(full=True).ok
    with pytest.raises(StoreIOError) as found:
        writer(sample.path)
    assert found.value.errno == errno.EROFS


def test_places_that_hold_no_store(ram: Path) -> None:
    (ram / "file").write_text("x")
    (ram / "empty").mkdir()
    for path in (ram / "absent", ram / "empty", ram / "file", ram / "file" / "below"):
        with pytest.raises(StoreNotFound, match=re.escape(str(path))):
            tierload.load(path)
    with pytest.raises(StoreIOError) as found:
        tierload.save(SMALL_STATE, ram / "file")
    assert found.value.errno == errno.ENOTDIR
    assert sorted(path.name for path in ram.iterdir()) == ["empty", "file"]
    assert not list((ram / "empty").iterdir()), "to look is not to make"


def test_signals_that_interrupt_calls(tmp_path: Path) -> None:
    """EINTR: a profiler's timer, without SA_RESTART, while a store on a real file system is written and read."""

    def body() -> int:
        seen = 0

        def handler(*_: object) -> None:
            nonlocal seen
            seen += 1

        signal.signal(signal.SIGALRM, handler)
        signal.siginterrupt(signal.SIGALRM, True)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        with writer(tmp_path / "store") as store:
            for step in range(12):
                store.save(noise(256, seed=step), step=step)
                store.record("lr", step)
        with tierload.open(tmp_path / "store", settings=SMALL) as reader:
            for step in range(12):
                assert_alike(reader.load(step=step), noise(256, seed=step))
            assert reader.verify(full=True).ok
        signal.setitimer(signal.ITIMER_REAL, 0)
        return seen

    assert run(body) > 3


def test_more_segments_than_a_process_may_open_files(ram: Path) -> None:
    """A state that grows by a tensor a commit has its pages in as many segments as there are commits."""

    def body() -> None:
        state: dict[str, Any] = {}
        with writer(ram / "store") as store:
            for number in range(80):
                state[f"t{number}"] = torch.full((300,), number)
                store.save(state, step=number)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with tierload.open(ram / "store", settings=SMALL) as reader:
            assert_alike(reader.load(), state)
            assert reader.verify(full=True).ok
        with writer(ram / "store") as store:
            store.save({**state, "t0": torch.zeros(5)}, step=80)
            store.collect(keep=1)

    run(body)
