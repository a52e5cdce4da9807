"""B56 and B57: tensors beyond 2 and 4 GiB, calls that do less than they were asked to, and very many small tensors."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tierload
from tests.cases.children import script, strace
from tests.cases.memory import peak
from tests.cases.stores import SMALL, assert_is, let_go, sizes
from tierload import Settings

GIB = 1 << 30


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    let_go(tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)


def patterned(nbytes: int, start: int = 0) -> torch.Tensor:
    """Bytes that are different in every page, with the last one stamped."""
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    np.copyto(tensor.numpy()[: nbytes // 8 * 8].view(np.int64), np.arange(start, start + nbytes // 8, dtype=np.int64))
    tensor[-8:] = 0
    tensor[-1] = 77
    return tensor


def assert_patterned(tensor: torch.Tensor, nbytes: int, start: int = 0) -> None:
    assert tensor.shape == (nbytes,)
    assert tensor[-1] == 77
    words = tensor.numpy()[: nbytes // 8 * 8].view(np.int64)[:-1]
    for at in range(0, len(words), 1 << 24):
        part = words[at : at + (1 << 24)]
        assert np.array_equal(part, np.arange(start + at, start + at + len(part))), f"near byte {8 * at}"


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["off", "fast"])
@pytest.mark.parametrize("nbytes", [2 * GIB + 8, 4 * GIB + 8])
def test_b56_beyond_2_and_4_gib(disk: Path, nbytes: int, compression: str) -> None:
    path = disk / "store"
    tierload.save({"big": patterned(nbytes)}, path, settings=Settings(compression=compression))
    let_go(disk)
    target = {"big": torch.zeros(nbytes, dtype=torch.uint8)}
    with peak() as extra:
        tierload.load(path, into=target)
    assert extra[0] < 256 << 20
    assert_patterned(target["big"], nbytes)


@pytest.mark.slow
def test_b56_one_segment_beyond_4_gib(disk: Path) -> None:
    """Offsets in a segment that do not fit into 32 bits, with the largest pages."""
    nbytes = 4 * GIB + (64 << 20) + 8
    settings = Settings(compression="off", max_segment_size_mb=1 << 20, page_bytes=16 << 20)
    tierload.save({"big": patterned(nbytes), "tail": torch.arange(1000)}, disk / "store", settings=settings)
    let_go(disk)
    assert max(path.stat().st_size for path in (disk / "store" / "seg").iterdir()) > 4 * GIB
    assert torch.equal(tierload.load(disk / "store", keys="tail")["tail"], torch.arange(1000))
    assert_patterned(tierload.load(disk / "store")["big"], nbytes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(quantiz|Sparse invariant)")
def test_b56_parts_and_gaps_beyond_4_gib(ram: Path) -> None:
    """Integers of a quantized tensor, values of a sparse one, and a view with gaps, of 4.3 GiB each, one by one.

    What is saved is mostly zeros that take no memory; what is loaded takes all of it.
    """
    count = 4 * GIB + 300 * (1 << 20) + 5
    marks = (0, 1, 2 * GIB - 1, 2 * GIB, 4 * GIB - 1, 4 * GIB, 4 * GIB + 1, count - 1)

    def stamped(step: int) -> torch.Tensor:
        flat = torch.zeros(count * step, dtype=torch.uint8)[::step]
        for number, at in enumerate(marks):
            flat[at] = number + 1
        return flat

    def check(flat: torch.Tensor) -> None:
        assert flat.numel() == count
        assert [int(flat[at]) for at in marks] == list(range(1, len(marks) + 1))
        assert sum(int(part.count_nonzero()) for part in flat.split(GIB)) == len(marks)

    def quantized() -> torch.Tensor:
        flat = stamped(1)
        made = torch._empty_affine_quantized((1,), scale=0.25, zero_point=3, dtype=torch.quint8)
        return made.set_(flat.untyped_storage(), 0, (count,), (1,))

    tierload.save({"w": quantized()}, ram / "store")
    found = tierload.load(ram / "store")["w"]
    assert (found.q_scale(), found.q_zero_point()) == (0.25, 3)
    check(torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage(), 0, (count,), (1,)))
    del found
    indices = torch.tensor([[1]])
    tierload.save({"w": torch.sparse_coo_tensor(indices, stamped(1)[None], (2, count))}, ram / "store")
    sparse = tierload.load(ram / "store")["w"]
    assert sparse._indices().tolist() == [[1]]
    check(sparse._values()[0])
    del sparse
    tierload.save({"w": stamped(2)}, ram / "store")
    check(tierload.load(ram / "store")["w"])
    assert tierload.open(ram / "store").verify(full=True).ok


@pytest.mark.parametrize("compression", ["off", "fast", "small"])
@pytest.mark.parametrize("page_bytes", [4096, 1 << 20, 16 << 20])
def test_b56_small_pages_and_segments(store: Path, compression: str, page_bytes: int) -> None:
    """3 MiB and 8 bytes over several segments: every boundary is met."""
    nbytes = (3 << 20) + 8
    settings = Settings(compression=compression, page_bytes=page_bytes, max_segment_size_mb=1, pack_below_bytes=0)
    tierload.save({"big": patterned(nbytes), "odd": patterned(nbytes - 3, 1 << 40)}, store, settings=settings)
    let_go(store)
    found = tierload.load(store)
    assert_patterned(found["big"], nbytes)
    assert_patterned(found["odd"], nbytes - 3, 1 << 40)
    if compression == "off":
        assert len(list((store / "seg").iterdir())) >= (6 if page_bytes < 16 << 20 else 2)
    assert tierload.open(store).verify(full=True).ok


SHORT = """
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#undef _FILE_OFFSET_BITS
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
/* On files below SHORT_DIR, every call moves at most 777 bytes. */
static size_t few(int fd, size_t length) {
  char link[64], path[4096];
  const char *const dir = getenv("SHORT_DIR");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path);
  const int ours = dir != NULL && n > 0 && (size_t)n >= strlen(dir) && strncmp(path, dir, strlen(dir)) == 0;
  return ours && length > 777 ? 777 : length;
}
ssize_t pread64(int fd, void *data, size_t length, off_t at) {
  return syscall(SYS_pread64, fd, data, few(fd, length), at);
}
ssize_t pwrite64(int fd, const void *data, size_t length, off_t at) {
  return syscall(SYS_pwrite64, fd, data, few(fd, length), at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) {
  return count == 0 ? 0 : pwrite64(fd, parts[0].iov_base, parts[0].iov_len, at);
}
ssize_t pread(int fd, void *data, size_t length, off_t at) { return pread64(fd, data, length, at); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t at) { return pwrite64(fd, data, length, at); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return pwritev64(fd, parts, count, at); }
"""


def test_b56_calls_that_do_less_than_they_were_asked_to(ram: Path) -> None:
    """Every read and write of three saves and a load moves at most 777 bytes, and one part of several."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the preloaded library")
    (ram / "short.c").write_text("#include <stdio.h>\n" + SHORT)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", ram / "short.so", ram / "short.c"]
    subprocess.run(command, check=True, capture_output=True)
    under = strace(ram / "log", ("pread64", "pwrite64", "pwritev"))
    script("script_save", ram / "store", 3, under=under, LD_PRELOAD=str(ram / "short.so"), SHORT_DIR=str(ram / "store"))
    moved = [line.rsplit("= ", 1) for line in (ram / "log").read_text().splitlines() if f"<{ram / 'store'}" in line]
    for kind in ("pread64", "pwrite64"):
        assert sum(int(result) == 777 for call, result in moved if f"{kind}(" in call) > 20
    assert max(int(result) for _, result in moved) == 777
    assert_is(tierload.load(ram / "store"), 3)
    assert tierload.open(ram / "store").verify(full=True).ok


def test_b56_calls_that_are_interrupted(ram: Path) -> None:
    """EINTR for every second read, write and sync of a file of the store."""
    calls = ("pwritev", "fdatasync", "pread64")
    names = ["SUPER", "wal/c-00000001-00000000", "wal/m-00000001-00000000"]
    for txid in (1, 2, 3):
        names += [f"seg/00000001-{txid:012x}.r0000.0000", *(f"man/00000001-{txid:012x}.r0000{m}" for m in ("", ".m"))]
    files = [part for name in names for part in ("-P", str(ram / "store" / name))]
    under = strace(ram / "log", calls, *files, "-e", f"inject={','.join(calls)}:error=EINTR:when=1+2")
    script("script_save", ram / "store", 3, under=under)
    injected = [line for line in (ram / "log").read_text().splitlines() if "INJECTED" in line]
    for call in calls:
        assert sum(f" {call}(" in line for line in injected) >= 3, call
    assert_is(tierload.load(ram / "store"), 3)
    assert tierload.open(ram / "store").verify(full=True).ok


# -- B57


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    flat = torch.arange(count, dtype=torch.float32)
    return {f"layer{n % 97}.scale.{n}": flat[n].clone() for n in range(count)}


def check_many(path: Path, count: int) -> None:
    state = small_tensors(count)
    report = tierload.save(state, path)
    assert report.raw_bytes == 4 * count
    assert report.pages <= 2 + count * 4 // (128 << 10)
    assert sizes(path, "seg") < 8 * count + (1 << 20)
    assert tierload.save(state, path).written_bytes == 0
    let_go(path)
    key = f"layer{(count - 1) % 97}.scale.{count - 1}"
    assert tierload.load(path, keys=key)[key] == count - 1
    found = tierload.load(path)
    assert list(found) == list(state)
    assert all(float(found[name]) == value for value, name in enumerate(state))
    one = found[key]
    assert one.untyped_storage().nbytes() < 1 << 20, "one scalar does not keep all of them in memory"


def test_b57_two_thousand_scalars(store: Path) -> None:
    check_many(store, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("count", [100_000, 1_500_000])
def test_b57_very_many_scalars(store: Path, count: int) -> None:
    check_many(store, count)


def test_b57_settings_of_small_stores_hold_many_too(store: Path) -> None:
    tierload.save(small_tensors(3000), store, settings=SMALL)
    let_go(store)
    found = tierload.load(store)
    assert all(float(value) == n for n, value in enumerate(found.values()))
