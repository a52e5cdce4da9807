"""Stores from outside: what is in their files, which of them nobody needs, and letting go of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.state.alike import assert_alike
from tests.store.ondisk import files_of
from tierload import Settings, api
from tierload.engine import Store

SMALL = Settings(page_bytes=4096, pack_below_bytes=1024, max_segment_size_mb=1, threads=1)
"""Small pages and segments, so that a small state has several."""


def let_go(folder: Path) -> None:
    """Close the stores below ``folder`` that this process holds for ``tierload.save``."""
    for name, store in list(api._writers.items()):
        if Path(name).is_relative_to(folder.resolve()):
            del api._writers[name]
            store.close()


def state_of(number: int) -> dict[str, Any]:
    """A state in which everything but ``frozen`` tells its number; some pages are new for every number."""
    source = torch.Generator().manual_seed(number)
    return {
        "number": number,
        "w": torch.randn(6000, generator=source),
        "layers": [torch.full((700,), number, dtype=torch.int64), {"b": torch.tensor(float(number))}],
        "frozen": torch.arange(3000),
    }


def assert_is(state: Any, number: int) -> None:
    """``state`` is ``state_of(number)``, bit for bit."""
    assert_alike(state, state_of(number))


def data_files(store: Path) -> list[str]:
    """Segments and manifests, sorted."""
    return [name for name in files_of(store) if name.startswith(("seg/", "man/"))]


def sizes(store: Path, *folders: str) -> int:
    """Bytes of all files in some folders of a store."""
    return sum(path.stat().st_size for folder in folders for path in (store / folder).iterdir())


def hashes(store: Path) -> dict[str, str]:
    """The sha256 of every segment and manifest."""
    return {name: hashlib.sha256((store / name).read_bytes()).hexdigest() for name in data_files(store)}


def stored_keys(path: Path) -> list[str]:
    """The key of every chunk of the newest commit."""
    with Store(path) as store:
        infos = store.keys()
    return [info.key for info in infos]


def segments_of(store: Store, commit: Any) -> list[str]:
    """The segments that a commit's manifest names."""
    manifest = store._native.manifest(commit.txid)
    return [manifest.segment_path(n) for n in range(len(np.asarray(manifest.segments)) // 32)]


def manifest_of(store: Store, commit: Any) -> str:
    """The path of a commit's manifest; its mirror is the same with ``.m``."""
    return store._native.manifest_path(commit.txid)


def unreferenced(path: Path) -> set[str]:
    """Segments and manifests that no commit of the store needs."""
    with Store(path) as store:
        needed = set()
        for commit in store.commits():
            manifest = manifest_of(store, commit)
            needed |= {manifest, manifest + ".m", *segments_of(store, commit)}
    return set(data_files(path)) - needed
