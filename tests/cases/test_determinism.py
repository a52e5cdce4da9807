"""B62: the same saves give the same files; what is volatile is in LOCK, SUPER and wal/ only."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import tierload
from tests.cases.children import script
from tests.cases.script_determinism import save_all, state_of
from tests.cases.stores import hashes, let_go
from tests.store.ondisk import files_of
from tierload import Settings


def test_b62_hash_seeds_and_threads(ram: Path) -> None:
    """Three processes with other hash seeds, numbers of threads and moments."""
    for number, (seed, threads) in enumerate((("0", 1), ("1", 2), ("4242", 7))):
        script("script_determinism", ram / str(number), threads, PYTHONHASHSEED=seed, OMP_NUM_THREADS=str(threads))
    one, two, three = (hashes(ram / str(number)) for number in range(3))
    assert len(one) > 8
    assert one == two == three
    volatile = {name for name in files_of(ram / "0") if name not in one}
    assert {name.split("/")[0].split("-")[0] for name in volatile} == {"LOCK", "SUPER", "wal"}


def test_b62_one_process_at_another_time(ram: Path) -> None:
    """Other addresses, other random numbers, other clock."""
    save_all(ram / "a", threads=3)
    keep = [torch.empty(12345) for _ in range(20)]
    time.sleep(0.01)
    save_all(ram / "b", threads=1)
    assert hashes(ram / "a") == hashes(ram / "b")
    del keep


def test_b62_dicts_filled_in_another_order(ram: Path) -> None:
    """The order of a dict is part of a state, and so of its manifest; the data is the same."""
    save_all(ram / "a", threads=1)
    save_all(ram / "b", threads=1, backwards=True)
    one, two = (
        {name: digest for name, digest in hashes(ram / part).items() if name.startswith("seg/")} for part in "ab"
    )
    assert one == two
    assert one
    let_go(ram)
    assert list(tierload.load(ram / "a")) == list(reversed(tierload.load(ram / "b")))


def test_b62_a_state_that_did_not_change_costs_nothing(store: Path) -> None:
    settings = Settings(page_bytes=65536)
    first = tierload.save(state_of(1), store, step=1, settings=settings)
    segments = {name: digest for name, digest in hashes(store).items() if name.startswith("seg/")}
    again = tierload.save(state_of(1), store, step=2)
    assert first.written_pages > 10
    assert (again.written_pages, again.written_bytes, again.pages) == (0, 0, first.pages)
    assert {name: digest for name, digest in hashes(store).items() if name.startswith("seg/")} == segments
    with tierload.open(store) as opened:
        difference = opened.diff(1, 2)
    assert not difference.changed
    assert not difference.added
    assert not difference.removed
