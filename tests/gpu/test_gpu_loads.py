"""On a CUDA device: loads verify what lands there, hot starts compute with it, and pages go past the processor."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import tierload
from tests.accelerators.disguise import assert_values
from tests.gpu.test_gpu_saves import MIB, bits, noise
from tests.hot.starts import damage, held
from tierload import CorruptPage, Settings
from tierload.engine import loads
from tierload.gds import Choice
from tierload.state import GatedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("compression", ["fast", "off"])
@pytest.mark.parametrize("hot", [False, True], ids=["load", "hot start"])
def test_a_damaged_page_is_found(tmp_path: Path, compression: str, hot: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).cuda()
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(compression=compression)) as store:
        store.save({"model": model})
    damage(tmp_path / "s", "model/1.weight")

    def load() -> None:
        if not hot:
            tierload.load(tmp_path / "s", into={"model": model})
            return
        with tierload.hot_start(tmp_path / "s", model) as boot:
            model(torch.ones(1024, device="cuda"))
            boot.join()

    with pytest.raises(CorruptPage, match=r"1\.weight"):
        load()


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_hot_start_computes_what_a_load_does(tmp_path: Path, device: str) -> None:
    def made(on: str) -> torch.nn.Module:
        with torch.device(on):
            return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6)))

    model = made("cuda")
    x = torch.randn(8, 2048, device="cuda")
    with torch.no_grad():
        wanted = model(x)
    tierload.save({"model": model}, tmp_path / "s")
    other = made(device)
    with tierload.hot_start(tmp_path / "s", other) as boot, torch.no_grad():
        found = other(x) if device == "cuda" else other(x.cpu()).cuda()
        boot.join()
    if device == "cuda":
        assert torch.equal(found, wanted)
    assert_values(bits(dict(other.state_dict())), bits(dict(model.state_dict())))


def test_training_goes_on_from_a_hot_start(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 1)
        model = torch.nn.Sequential(*layers).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).cuda()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = made()
    train(model, optimizer, range(5))
    tierload.save({"model": model, "optimizer": optimizer}, tmp_path / "s")
    wanted = train(model, optimizer, range(5, 15))
    model, optimizer = made()
    with tierload.hot_start(tmp_path / "s", model, optimizer) as boot:
        assert train(model, optimizer, range(5, 15)) == wanted
        boot.join()


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}], ids=str
)
def test_a_step_waits_for_states_that_arrive_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    x = torch.randn(16, 256, device="cuda")

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [value for state in optimizer.state.values() for value in state.values()]

    model, optimizer = made()
    train(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, tmp_path / "s")
    with held(monkeypatch) as go:
        other, its = made()
        boot = tierload.hot_start(tmp_path / "s", other, its)
        assert all(type(state) is GatedTensor for state in states(its))
        assert {state.device.type for state in states(its)} == {state.device.type for state in states(optimizer)}
        threading.Timer(0.2, go.set).start()
        found = train(other, its)
    assert found == train(model, optimizer)
    boot.join()
    assert_values(bits(dict(other.state_dict())), bits(dict(model.state_dict())))
    assert_values(bits(states(its)), bits(states(optimizer)))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_device_maps(tmp_path: Path, target: str) -> None:
    state = {"a": noise(3, MIB), "b": noise(100).cpu()}
    wanted = bits(state)
    tierload.save(state, tmp_path / "s")
    into = {key: torch.empty_like(value, device=target) for key, value in state.items()}
    tierload.load(tmp_path / "s", into=into)
    assert_values(bits(into), wanted)


def test_raw_pages_go_through_kvikio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In kvikio's compatibility mode where there is no nvidia-fs; the code is that of GPUDirect Storage."""
    pytest.importorskip("kvikio", reason="needs kvikio: pip install tierload[gds]")
    monkeypatch.setattr(loads, "choose_way", lambda path, ring: Choice("gds", "gds", "gds: as the test wants"))
    state = {"large": noise(20, MIB), "odd": noise(MIB + 5, dtype=torch.uint8), "small": [noise(7) for _ in range(9)]}
    wanted = bits(state)
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(compression="off")) as store:
        store.async_save(state).result()
        assert store.head().io.endswith("GPU: gds: as the test wants")
        assert store.verify(full=True).ok
        into = torch.utils._pytree.tree_map_only(torch.Tensor, torch.zeros_like, state)
        assert store.load(into=into).io.endswith("GPU: gds: as the test wants")
        assert_values(bits(into), wanted)
    damage(tmp_path / "s", "large")
    with tierload.Store(tmp_path / "s", mode="w") as store, pytest.raises(CorruptPage, match="large"):
        store.load(into=into)
