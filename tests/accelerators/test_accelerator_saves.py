"""Saves of what an accelerator has: cloned there, digested there, and of it only what changed leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierload
from tests.accelerators.disguise import Device, assert_values, copies
from tierload import AcceleratorError, Settings
from tierload.engine import clones

MIB = 1 << 20


@pytest.fixture
def device() -> Device:
    return Device()


def state_of(device: Device) -> dict[str, object]:
    """Large and small tensors, odd sizes, mixed with those of the processor in packed pages."""
    flat = device.noise(700, 777, seed=1)
    return {
        "weight": device.noise(1024, 1024),
        "odd": device.noise(300_001, dtype=torch.bfloat16),
        "norms": [device.noise(63, seed=seed) for seed in range(40)],
        "steps": [torch.tensor(float(seed)) for seed in range(40)],
        "host": torch.arange(200_000.0),
        "tied": flat,
        "rows": flat[100:200],
        "gaps": flat[:, ::2],
        "transposed": flat.t(),
        "empty": device.noise(0, 3),
        "unaligned": device.tensor(torch.arange(100_003, dtype=torch.uint8), shift=3),
        "text": "words",
    }


@pytest.mark.parametrize("threads", [0, 1], ids=["threads", "alone"])
@pytest.mark.parametrize("compression", ["fast", "off"])
def test_a_save_has_every_byte(device: Device, tmp_path: Path, compression: str, threads: int) -> None:
    state = state_of(device)
    device.fake.delay(0.001)
    tierload.save(state, tmp_path / "s", settings=Settings(compression=compression, threads=threads))
    assert_values(tierload.load(tmp_path / "s"), copies(state))
    assert device.moved >= 3 * MIB
    with tierload.open(tmp_path / "s") as store:
        assert store.verify(full=True).ok


def test_what_is_the_parents_never_leaves(device: Device, tmp_path: Path) -> None:
    state = {"weight": device.noise(8, MIB // 4), "adapter": device.noise(20, MIB // 4, seed=1)}
    with tierload.Store(tmp_path / "s", mode="w") as store:
        store.save(state)
        for save in (store.save, lambda state: store.async_save(state).result()):
            before = device.moved
            assert save(state).written_pages == 0
            assert device.moved == before
            state["adapter"] += 1
            report = save(state)
            assert report.written_pages == 20
            assert 20 * MIB <= device.moved - before <= 22 * MIB  # some pages are looked at first
            assert_values(store.load(), copies(state))


@pytest.mark.parametrize("budget", [0, 1], ids=["clone", "host"])
def test_changes_after_the_call_are_not_in_the_save(device: Device, tmp_path: Path, budget: int) -> None:
    state = state_of(device)
    settings = Settings(device_budget_bytes=budget, compression="off")
    device.fake.delay(0.002)
    with tierload.Store(tmp_path / "s", mode="w", settings=settings) as store:
        for _ in range(3):
            wanted = copies(state)
            pending = store.async_save(state)
            for value in (state["weight"], state["odd"], state["host"], *state["norms"], *state["steps"]):
                value += 1
            pending.result()
            assert_values(store.load(), wanted)


def test_a_clone_leaves_a_step_alone(device: Device, tmp_path: Path) -> None:
    """A guarded optimizer's step does not wait for what is cloned, nor is it torn."""
    model = device.module(torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tierload.guard(optimizer)
    with tierload.Store(tmp_path / "s", mode="w") as store:
        wanted = copies(dict(model.state_dict()))
        device.fake.delay(0.2)
        pending = store.async_save({"model": model})
        model(torch.ones(512)).sum().backward()
        optimizer.step()
        pending.staged()
        device.fake.delay(0)
        pending.result()
        assert_values(store.load()["model"], wanted)


@pytest.mark.parametrize("budget", [0, 1], ids=["clone", "host"])
def test_a_failing_accelerator_fails_the_save_and_nothing_else(device: Device, tmp_path: Path, budget: int) -> None:
    state = {"weight": device.noise(4, MIB // 4)}
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(device_budget_bytes=budget)) as store:
        store.save(state, step=1)
        state["weight"] += 1
        wanted = copies(state)
        device.fake.fail_after(2)
        with pytest.raises(AcceleratorError, match="fails, as it was told"):
            store.async_save(state, step=2).result()
        assert store.head().step == 1
        device.fake.fail_after(-1)
        store.save(state, step=3)
        assert_values(store.load(), wanted)


def test_a_clone_is_bounded_and_falls_back(device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"weight": device.noise(4, MIB // 4)}
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(device_budget_bytes=3 * MIB)) as store:
        store.async_save(state).result()
        assert "does not fit into device_budget_bytes" in caplog.text
        assert_values(store.load(), copies(state))
    with pytest.raises(ValueError, match="device_budget_bytes is -1"):
        Settings(device_budget_bytes=-1)


def test_a_device_that_has_only_parts_of_pages(device: Device, tmp_path: Path) -> None:
    other = Device()
    state = {"large": device.noise(MIB // 4), "small": [device.noise(9), other.noise(11), other.noise(5)]}
    device.fake.delay(0.002)
    with tierload.Store(tmp_path / "s", mode="w") as store:
        store.prepare(state)
        wanted = copies(state)
        store.async_save(state).result()
        assert_values(store.load(), wanted)


def test_a_device_that_is_lost_after_the_copy_does_not_hang_the_save(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(number: int) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    state = {"weight": device.noise(MIB // 4)}
    with tierload.Store(tmp_path / "s", mode="w") as store:
        pending = store.async_save(state)
        monkeypatch.setattr(clones, "free_bytes", lost)
        pending.result(timeout=20)


def test_overlapping_saves_keep_their_memory_within_the_budget(device: Device, tmp_path: Path) -> None:
    state = {"weight": device.noise(MIB // 4)}
    settings = Settings(max_in_flight=3, device_budget_bytes=2 * MIB)
    made = []
    allocate = clones.allocate
    with tierload.Store(tmp_path / "s", mode="w", settings=settings) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(clones, "allocate", lambda *args: made.append(args) or allocate(*args))
        for _ in range(4):
            pending = []
            for _ in range(3):  # the third one goes to the host
                state["weight"] += 1
                pending.append((store.async_save(state), copies(state)))
            for save, wanted in pending:
                assert_values(store.load(commit=save.result().commit), wanted)
    assert len(made) == 2


def test_pinned_memory_is_returned(device: Device, tmp_path: Path) -> None:
    from tierload import _native

    state = {"weight": device.noise(16, MIB // 4)}
    with tierload.Store(tmp_path / "s", mode="w") as store:
        store.async_save(state).result()
        held, _ = _native.pinned_use()
        for _ in range(5):
            state["weight"] += 1
            store.async_save(state).result()
            store.load(into=state)
        assert _native.pinned_use()[0] <= held + 64 * MIB
    _native.trim_pinned()
    assert _native.pinned_use()[0] < held
