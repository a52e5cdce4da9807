"""Tensors are saved by DCP as they are spread over some ranks, and loaded as they are spread over others. Beside it the
storage of torch itself, for the same states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import tierload
from tests.hooks.dcp.states import LAYOUTS, differences, empty_of, load, save, state_of, values
from tests.ranks.world import results
from tierload.hooks.dcp import Reader, Writer

SAVED = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts]


def seed_of(ranks: int, name: str) -> int:
    return 100 * SAVED.index((ranks, name))


def saved(rank: int, ranks: int, folder: str) -> list[Any]:
    """Saves every layout of so many ranks, by both."""
    found = []
    for name, layout in LAYOUTS[ranks].items():
        state = state_of(layout, seed_of(ranks, name))
        writer = Writer(f"{folder}/store", step=seed_of(ranks, name))
        metadata = save(state, storage_writer=writer)
        save(state, checkpoint_id=f"{folder}/stock-{ranks}-{name}", storage_writer=FileSystemWriter(folder))
        assert writer.report is not None
        found.append((name, metadata.storage_data["commit"], writer.report.commit.id))
    return found


def loaded(rank: int, ranks: int, folder: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Loads what all others have saved, into some layouts of so many ranks; what is wrong, by who read it."""
    wrong: dict[str, list[str]] = {"tierload": [], "stock": []}
    for before, name in SAVED:
        readers = {
            "tierload": Reader(f"{folder}/store", step=seed_of(before, name)),
            "stock": FileSystemReader(f"{folder}/stock-{before}-{name}"),
        }
        for here in names:
            layout = LAYOUTS[ranks][here]
            for kind, reader in readers.items():
                state = load(empty_of(layout), storage_reader=reader)
                differ = differences(state, layout, seed_of(before, name))
                wrong[kind] += [f"{before} {name} -> {ranks} {here}: {place}" for place in differ]
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resharding")
    for ranks in LAYOUTS:
        for layouts in zip(*results(ranks, saved, str(folder)), strict=True):
            ids = {id for _, *both in layouts for id in both}
            assert len(ids) == 1, f"{layouts}: one commit by all ranks"
    return folder


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ("alone",)),
        (2, ("rows", "columns")),
        (4, ("grid", "rows twice")),
        *(pytest.param(ranks, tuple(layouts), marks=pytest.mark.slow) for ranks, layouts in LAYOUTS.items()),
    ],
)
def test_every_layout_is_loaded_into_others(folder: Path, ranks: int, names: tuple[str, ...]) -> None:
    for found in results(ranks, loaded, str(folder), names, limit=120):
        assert found == {"tierload": [], "stock": []}


@pytest.mark.parametrize(("ranks", "name"), SAVED)
def test_the_commit_is_an_ordinary_one(folder: Path, ranks: int, name: str) -> None:
    found: Any = tierload.load(folder / "store", step=seed_of(ranks, name))
    right = values(seed_of(ranks, name))
    assert found["model"].keys() == right.keys()
    assert all(torch.equal(found["model"][key], tensor) for key, tensor in right.items())
    assert found["rest"]["n"] == 3 + seed_of(ranks, name)
    assert found["rest"]["t"] == (1, "a")


def test_all_of_it_is_verified_and_stored_once(folder: Path) -> None:
    with tierload.open(folder / "store") as store:
        assert store.verify(full=True).ok
        assert {commit.ranks for commit in store.commits()} == set(LAYOUTS)
