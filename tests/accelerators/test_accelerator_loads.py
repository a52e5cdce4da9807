"""Loads into an accelerator's memory: every byte verified, raw pages where they land."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierload
from tests.accelerators.disguise import Device, assert_values, copies
from tests.accelerators.test_accelerator_saves import MIB, state_of
from tests.hot.starts import damage
from tierload import AcceleratorError, CorruptPage, Settings


def emptied(state: object) -> None:
    """Everything is something else."""
    torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.fill_(7), state)


@pytest.mark.parametrize("threads", [0, 1], ids=["threads", "alone"])
@pytest.mark.parametrize("compression", ["fast", "off"])
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_load_has_every_byte(tmp_path: Path, compression: str, threads: int, io: str) -> None:
    device = Device()
    state = state_of(device)
    settings = Settings(compression=compression, threads=threads, io=io)
    wanted = copies(state)
    with tierload.Store(tmp_path / "s", mode="w", settings=settings) as store:
        store.save(state)
        emptied(state)
        device.fake.delay(0.001)
        store.load(into=state)
    assert_values(copies(state), wanted)
    assert device.fake.bytes_to_device > 3 * MIB


@pytest.mark.parametrize("compression", ["fast", "off"])
def test_damage_is_found_before_the_load_returns(tmp_path: Path, compression: str) -> None:
    device = Device()
    state = {"model": {"a": device.noise(MIB // 2), "b": device.noise(MIB // 2, seed=1)}}
    tierload.save(state, tmp_path / "s", settings=Settings(compression=compression))
    damage(tmp_path / "s", "model/b")
    with pytest.raises(CorruptPage, match="model/b"):
        tierload.load(tmp_path / "s", into=state)


def test_a_failing_accelerator_fails_the_load(tmp_path: Path) -> None:
    device = Device()
    state = {"a": device.noise(MIB)}
    tierload.save(state, tmp_path / "s")
    device.fake.fail_after(1)
    with pytest.raises(AcceleratorError, match="fails, as it was told"):
        tierload.load(tmp_path / "s", into=state)
    device.fake.fail_after(-1)
    tierload.load(tmp_path / "s", into=state)


def test_a_state_moves_between_devices(tmp_path: Path) -> None:
    one, other = Device(), Device()
    state = {"a": one.noise(MIB, seed=1), "b": other.noise(MIB, seed=2), "small": [one.noise(9), other.noise(9)]}
    wanted = copies(state)
    with tierload.Store(tmp_path / "s", mode="w") as store:
        store.save(state)
        assert store.async_save(state).result().written_pages == 0  # a clone of two is what it is a clone of
    both = {"a": other.noise(MIB), "b": other.noise(MIB), "small": [other.noise(9), torch.zeros(9)]}
    tierload.load(tmp_path / "s", into=both)
    assert_values(copies(both), wanted)
    assert_values(tierload.load(tmp_path / "s"), wanted)


def test_a_hot_start_fills_an_accelerator(tmp_path: Path) -> None:
    device = Device()
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    tierload.save({"model": model}, tmp_path / "s")
    wanted = copies(dict(model.state_dict()))
    there = device.module(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
    device.fake.delay(0.005)
    with tierload.hot_start(tmp_path / "s", there) as boot:
        there(torch.ones(256))
        boot.join()
    assert device.fake.bytes_to_device >= 4 * 256 * 256 * 4
    assert_values(copies(dict(there.state_dict())), wanted)
