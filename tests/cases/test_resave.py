"""B71: saving what was loaded, to where it was loaded from, and removing a checkpoint that is in use."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierload
from tests.cases.stores import SMALL, assert_is, hashes, let_go, state_of
from tests.state.alike import assert_alike
from tierload import Settings

RAW = Settings(compression="off", page_bytes=65536)


@pytest.fixture(params=["ext4 or so", "tmpfs"])
def place(request: pytest.FixtureRequest, ram: Path, tmp_path: Path) -> Iterator[Path]:
    """The file system of the temporary folder, and memory."""
    folder = ram if request.param == "tmpfs" else tmp_path
    yield folder / "store"
    let_go(folder)


@pytest.mark.parametrize("settings", [RAW, SMALL], ids=["raw", "compressed"])
def test_b71_load_and_save_to_the_same_path(place: Path, settings: Settings) -> None:
    original = {"w": torch.randn(200_000), "v": torch.arange(50_000)}
    tierload.save(original, place, settings=settings)
    let_go(place)
    d = tierload.load(place)
    d["w"] += 0
    assert tierload.save(d, place, settings=settings).written_bytes == 0
    assert_alike(d, original)
    d["w"] += 1
    tierload.save(d, place)
    assert_alike(d, {"w": original["w"] + 1, "v": original["v"]})
    let_go(place)
    assert_alike(tierload.load(place), d)
    first = tierload.open(place).commits()[-1]
    assert_alike(tierload.load(place, commit=first), original)


def test_b71_edits_in_place_never_reach_the_files(place: Path) -> None:
    tierload.save(state_of(1), place, settings=RAW)
    let_go(place)
    before = hashes(place)
    state = tierload.load(place)
    state["w"].fill_(7.0)
    state["layers"][0].zero_()
    target = {"w": torch.zeros(6000)}
    tierload.load(place, into=target, keys="w")
    target["w"].fill_(9.0)
    del state, target
    assert hashes(place) == before
    assert_is(tierload.load(place), 1)


@pytest.mark.parametrize("how", ["collect", "remove the files", "remove the store", "write zeros over the files"])
def test_b71_a_checkpoint_in_use_is_removed(place: Path, how: str) -> None:
    tierload.save(state_of(1), place, step=1, settings=RAW)
    let_go(place)
    reader = tierload.open(place)
    state = reader.load()
    copied = copy.deepcopy(state)
    if how == "collect":
        with tierload.open(place, mode="w") as store:
            store.save(state_of(2), step=2)
            assert store.collect(keep=1).removed_files >= 3
    elif how == "remove the store":
        shutil.rmtree(place)
    else:
        for path in (place / "seg").iterdir():
            if how.startswith("remove"):
                path.unlink()
            else:
                path.write_bytes(bytes(path.stat().st_size))
    assert_is(state, 1)
    assert_alike(state, copied)
    state["w"] += 1
    assert torch.equal(state["w"], copied["w"] + 1)
    reader.close()
