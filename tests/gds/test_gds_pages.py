"""Raw pages of a store between its files and an accelerator's memory, past the processor: the right ones, verified."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import tierload
from tests.accelerators.disguise import Device, assert_values, copies
from tests.hot.starts import damage
from tierload import CorruptPage, Settings
from tierload.engine import loads
from tierload.gds import Choice

MIB = 1 << 20


@pytest.fixture(autouse=True)
def way(kvikio: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "choose_way", lambda path, ring: Choice("gds", "gds", "gds: as the test wants"))


def state_of(device: Device) -> dict[str, object]:
    """Whole pages, a short last one, packed ones, and the processor's."""
    return {
        "whole": device.noise(3, MIB // 4),
        "short": device.noise(MIB // 4 + 1001),
        "small": [device.noise(7), torch.arange(5.0)],
        "host": torch.arange(100_000.0),
    }


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_whole_raw_pages_never_come_to_the_processor(tmp_path: Path, background: bool) -> None:
    device = Device()
    state = state_of(device)
    wanted = copies(state)
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(compression="off", max_segment_size_mb=2)) as store:
        report = store.async_save(state).result() if background else store.save(state)
        assert device.moved < MIB // 2  # the short one and small ones
        assert report.commit.io.endswith("GPU: gds: as the test wants")
        assert store.verify(full=True).ok
        assert_values(store.load(), wanted)
        torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.zero_(), state)
        before = device.fake.bytes_to_device
        assert store.load(into=state).io.endswith("GPU: gds: as the test wants")
        assert device.fake.bytes_to_device - before < MIB // 2
        assert_values(copies(state), wanted)


def test_what_is_compressed_goes_through_the_processor(tmp_path: Path) -> None:
    device = Device()
    state = state_of(device)
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(compression="fast")) as store:
        report = store.save(state)
        assert report.commit.io.endswith("GPU: ring, nothing was raw")
        assert_values(store.load(), copies(state))


def test_damage_is_found_by_the_accelerator(tmp_path: Path) -> None:
    device = Device()
    state = state_of(device)
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(compression="off")) as store:
        store.save(state)
    damage(tmp_path / "s", "whole")
    with tierload.Store(tmp_path / "s", mode="w") as store, pytest.raises(CorruptPage, match="whole"):
        store.load(into=state)
