"""States of optimizers in an accelerator's memory: made there by a load, and last to arrive in a hot start."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.accelerators.disguise import Device
from tests.cases.conftest import one_thread, ram, store
from tests.hot.starts import LONG_S, SMALL, Model, assert_same, damage, held, step
from tests.state.alike import assert_alike
from tierload import CorruptPage
from tierload.engine import hot_start
from tierload.state import GatedTensor, device_of, optimizer_states
from tierload.state.views import TensorView

__all__ = ["one_thread", "ram", "store"]

WAYS = {"one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """What is made for optimizers is made there."""
    device = Device()

    def empty(view: TensorView, _: torch.device) -> torch.Tensor:
        return device.tensor(torch.full(view.shape, 7, dtype=view.row.torch))

    monkeypatch.setattr(optimizer_states, "_empty", empty)
    return device


def made(device: Device, seed: int, **options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = device.module(Model())
    model.out.weight = model.words.weight
    return model, torch.optim.AdamW(model.parameters(), lr=seed * 1e-3, **options)


def trained(path: Path, device: Device, **options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    model, optimizer = made(device, 1, **options)
    for _ in range(2):
        step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, path, settings=SMALL)
    return model, optimizer


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def test_a_training_goes_on_from_a_load(store: Path, device: Device) -> None:
    model, optimizer = trained(store, device)
    other, its = made(device, 2)
    before = device.fake.bytes_to_device
    tierload.load(store, into={"model": other, "optimizer": its})
    states = states_of(its)
    assert all(device_of(state) == device.fake.number for state in states)
    assert device.fake.bytes_to_device - before >= sum(state.nbytes for state in states)
    assert [step(other, its) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]
    assert_alike(optimizer.state_dict(), its.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_a_step_waits_for_states_that_arrive_last(
    store: Path, device: Device, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model, optimizer = trained(store, device, **WAYS[way])
    expected = [step(model, optimizer) for _ in range(3)]
    with held(monkeypatch) as go:
        warm, its = made(device, 2)
        boot = tierload.hot_start(store, warm, its)
        assert all(type(state) is GatedTensor for state in states_of(its))
        losses: list[float] = []
        thread = threading.Thread(target=lambda: losses.extend(step(warm, its) for _ in range(3)), daemon=True)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "it did not wait"
        go.set()
        thread.join(LONG_S)
    assert losses == expected
    boot.join()
    assert_same(model, warm)
    assert_alike(optimizer.state_dict(), its.state_dict())
    assert all(device_of(state) == device.fake.number for state in states_of(its))


def test_damage_of_a_state_is_told_and_no_target_was_overwritten(store: Path, device: Device) -> None:
    trained(store, device)
    damage(store, "optimizer/state/model~1blocks.1.recurrence.weight_hh_l0/exp_avg_sq")
    model, optimizer = made(device, 2)
    with pytest.raises(CorruptPage, match=r"weight_hh_l0/exp_avg_sq") as error:
        tierload.load(store, into={"model": model, "optimizer": optimizer}, keys=["optimizer/*"])
    assert error.value.overwritten == ()
    assert not optimizer.state


def test_states_that_torch_has_to_move_are_there_first(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is meta here, which is no accelerator within reach either."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    tierload.save({"optimizer": optimizer}, store)
    its = torch.optim.AdamW(nn.Linear(8, 8, device="meta").named_parameters())
    with held(monkeypatch):
        with tierload.open(store) as opened:
            boot = opened.hot_start(into={"optimizer": its})
        assert boot.progress.total_tensors == 0
        assert [state["exp_avg"].is_meta for state in its.state.values()] == [True, True]
        assert [state["step"].item() for state in its.state.values()] == [1, 1]


def test_only_the_processors_memory_is_locked(store: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[tuple[int, int]]] = []
    regions = hot_start._hot_regions
    monkeypatch.setattr(hot_start, "_hot_regions", lambda *given: found.append(regions(*given)) or found[-1])
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tierload.save({"model": model}, store)
    half = nn.Sequential(device.module(nn.Linear(64, 64)), nn.Linear(64, 64))
    tierload.hot_start(store, half).join()
    assert {address for address, _ in found[0]} <= {one.data_ptr() for one in half[1].parameters()}
    assert found[0], "there is room for one"
