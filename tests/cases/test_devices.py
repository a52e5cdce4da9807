"""B73, B78 and B97: how data is read from slow and from warm places, and compression that must pay."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierload
from tests.cases.stores import sizes
from tierload import Settings

MIB = 1 << 20
BUFFERED = Settings(io="buffered", compression="off")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a disk: files in memory are never cold."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


def saved(path: Path, mebibytes: int) -> dict[str, torch.Tensor]:
    state = {str(n): torch.randint(0, 256, (MIB,), dtype=torch.uint8) for n in range(mebibytes)}
    tierload.Store(path, mode="w", settings=BUFFERED).save(state)
    return state


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_b73_files_are_read_in_large_pieces_and_not_mapped(folder: Path) -> None:
    """Where each read is a trip over a network, or each page fault one, small ones take minutes."""
    saved(folder / "store", 48)
    code = (
        "import tierload\n"
        f"store = tierload.open({str(folder / 'store')!r}, settings=tierload.Settings(io='buffered', threads=1))\n"
        "assert len(store.load()) == 48"
    )
    log = folder / "strace"
    command = ["strace", "-f", "-y", "-e", "trace=pread64,preadv,preadv2,read,mmap", "-o", str(log)]
    subprocess.run([*command, sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    calls = [line for line in log.read_text().splitlines() if "/store/seg/" in line]
    assert not [line for line in calls if "mmap(" in line]
    read = [int(found[1]) for line in calls if (found := re.search(r"\) += (\d+)$", line)) and int(found[1])]
    assert sum(read) >= 48 * MIB
    assert sum(read) / len(read) >= MIB / 2


def test_b78_what_is_in_the_page_cache_is_taken_from_there(folder: Path) -> None:
    """A restart on the same machine: the device has nothing to do, and no direct read goes past the cache."""
    state = saved(folder / "store", 32)

    def read_from_devices() -> int:
        text = Path("/proc/self/io").read_text()
        return int(re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    before = read_from_devices()
    with tierload.open(folder / "store") as store:  # io="auto"
        got = store.load()
        assert store._native.direct_bytes == 0
    assert read_from_devices() - before < MIB
    assert isinstance(got, dict)
    assert all(torch.equal(got[key], value) for key, value in state.items())


def noise() -> torch.Tensor:
    return torch.randint(-(1 << 15), 1 << 15, (4 * MIB,), dtype=torch.int16).view(torch.bfloat16)


DATA = {
    "random bf16": (noise, 1.0),
    "already compressed": (
        lambda: torch.frombuffer(bytearray(zlib.compress(os.urandom(8 * MIB), 1)), dtype=torch.uint8),
        1.0,
    ),
    "trained-like bf16": (lambda: torch.randn(4 * MIB).mul(0.02).to(torch.bfloat16), 1.45),
    "an optimizer's state, mostly zeros": (lambda: torch.randn(2 * MIB) * (torch.rand(2 * MIB) < 0.02), 5.0),
}


@pytest.mark.parametrize("compression", ["fast", "small"])
@pytest.mark.parametrize("name", DATA)
def test_b97_compression_pays_or_is_left_out(folder: Path, name: str, compression: str) -> None:
    make, ratio = DATA[name]
    tensor = make()
    with tierload.Store(folder / "s", mode="w", settings=Settings(compression=compression)) as store:  # type: ignore[arg-type]
        report = store.save({"t": tensor})
        assert report.written_bytes <= 1.001 * report.raw_bytes / ratio
        assert sizes(folder / "s", "seg") == report.written_bytes, "no copy beside it"
        got = store.load()
    assert isinstance(got, dict)
    assert torch.equal(got["t"].view(torch.uint8), tensor.view(torch.uint8))
