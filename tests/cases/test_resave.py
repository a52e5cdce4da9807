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
from tests.state.alike import assert_alike, materialised
from tierload import Settings

RAW = Settings(compression="off", page_bytes=65536)


@pytest.fixture(params=["ext4 or so", "tmpfs"])
def place(request: pytest.FixtureRequest, ram: Path, tmp_path: Path) -> Iterator[Path]:
    """The file system of the temporary folder, and memory."""
    folder = ram if request.param == "tmpfs" else tmp_path
    yield folder / "store"
    let_go(folder)


@pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy"])
@pytest.mark.parametrize("settings", [RAW, SMALL], ids=["raw", "compressed"])
def test_b71_load_and_save_to_the_same_path(place: Path, settings: Settings, lazy: bool) -> None:
    original = {"w": torch.randn(200_000), "v": torch.arange(50_000)}
    tierload.save(original, place, settings=settings)
    let_go(place)
    d = tierload.load(place, lazy=lazy)
    d["w"] += 0
    assert tierload.save(d, place, settings=settings).written_bytes == 0
    assert_alike(materialised(d), original)
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


def remove(place: Path, how: str) -> int:
    """What may become of a checkpoint; how many files a collection has removed."""
    if how == "collect":
        with tierload.open(place, mode="w") as store:
            store.save(state_of(2), step=2)
            return store.collect(keep=1).removed_files
    if how == "remove the store":
        shutil.rmtree(place)
    else:
        for path in (place / "seg").iterdir():
            if how.startswith("remove"):
                path.unlink()
            else:
                path.write_bytes(bytes(path.stat().st_size))
    return 0


REMOVALS = ["collect", "remove the files", "remove the store", "write zeros over the files"]


@pytest.mark.parametrize("how", REMOVALS)
def test_b71_a_checkpoint_in_use_is_removed(place: Path, how: str) -> None:
    tierload.save(state_of(1), place, step=1, settings=RAW)
    let_go(place)
    reader = tierload.open(place)
    state = reader.load()
    copied = copy.deepcopy(state)
    removed = remove(place, how)
    assert removed >= 3 or how != "collect"
    assert_is(state, 1)
    assert_alike(state, copied)
    state["w"] += 1
    assert torch.equal(state["w"], copied["w"] + 1)
    reader.close()


@pytest.mark.parametrize("how", REMOVALS)
def test_b71_what_a_lazy_state_has_not_read_is_kept_or_missed(place: Path, how: str) -> None:
    tierload.save(state_of(1), place, step=1, settings=RAW)
    let_go(place)
    state, right = tierload.load(place, lazy=True), tierload.load(place)
    remove(place, how)
    if how == "collect":
        assert_alike(materialised(state), right)
        return
    for use in (lambda: state["w"][:10], lambda: state["w"].sum(), lambda: state["layers"][0].numpy()):
        with pytest.raises(OSError, match="seg/"):
            use()
