"""A cold load of a part reads the pages that it needs and hardly a byte more, by the kernel's own count."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import tierload
from tierload import Settings
from tierload.engine.loading import table_of

MIB = 1 << 20
SECTOR = 4096
MOST = 1.02


def saved(path: Path, compression: str, tensors: int, nbytes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {str(n): torch.randn(nbytes // 4, generator=generator) * 0.02 for n in range(tensors)}
    settings = Settings(compression=compression)  # type: ignore[arg-type]
    with tierload.Store(path, mode="w", settings=settings) as store:
        store.save(state)
    forget(path)
    return state


def forget(path: Path) -> None:
    """The kernel's copies of segments are dropped."""
    for segment in (path / "seg").iterdir():
        with segment.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def needed(store: tierload.Store, keys: set[str]) -> int:
    """Stored bytes of the pages that hold these keys, in whole sectors."""
    table = table_of(store._native.manifest(store.head().txid))  # type: ignore[union-attr]
    pages: set[int] = set()
    for info in table.chunks.infos():
        if info.key in keys:
            row = table.rows[info.number]
            pages |= set(range(row["first_page"], row["first_page"] + row["pages"]))
    lengths = table.pages["stored_length"][sorted(pages)].astype(np.int64)
    return int((-(-lengths // SECTOR) * SECTOR).sum())


def read_so_far() -> int:
    """Bytes that this process made the kernel fetch from devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@pytest.mark.parametrize("compression", ["off", "fast"])
@pytest.mark.parametrize(
    ("tensors", "nbytes", "every", "way"),
    [
        (64, MIB, 4, "direct"),
        (64, MIB, 1, "direct"),
        (12, 5 * MIB + 20000, 3, "direct"),
        (64, MIB, 16, "page cache"),  # too little to go past it
        (64, MIB, 64, "page cache"),
        (4000, 4096, 4000, "page cache"),
        (400, 64 << 10, 2, "direct"),  # small pages, and small gaps between them
        (400, 64 << 10, 7, "page cache"),
        (4000, 4096, 7, "direct"),  # several in a page
    ],
)
def test_a_cold_load_of_some_keys_reads_their_pages_alone(
    disk: Path, compression: str, tensors: int, nbytes: int, every: int, way: str
) -> None:
    path = disk / "store"
    state = saved(path, compression, tensors, nbytes)
    keys = [str(n) for n in range(0, tensors, every)]
    with tierload.open(path) as store:
        wanted = needed(store, set(keys))
        before = read_so_far()
        got = store.load(keys=keys)
        read = read_so_far() - before
        assert isinstance(got, dict)
        assert all(torch.equal(got[key], state[key]) for key in keys)
        assert wanted <= read <= MOST * wanted
        assert way == ("direct" if store._native.direct_bytes > 0 else "page cache")
