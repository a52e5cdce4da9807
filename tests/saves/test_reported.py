"""Failures that people met with asynchronous saves elsewhere, each tried on tierload from end to end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils._pytree import tree_map

import tierload
from tests.saves.stamped import pattern
from tests.saves.training import SETTINGS, WIDTH, Run, network, storm
from tierload import Settings, UnsupportedValue

THROTTLED = Settings(page_bytes=16384, pack_below_bytes=1024, compression="off", bandwidth_cap_mbps=50)
SIZE = 200_000


def plain(folder: Path) -> torch.Tensor:
    return torch.empty(SIZE)


def shared(folder: Path) -> torch.Tensor:
    return torch.empty(SIZE).share_memory_()


def mapped(folder: Path) -> torch.Tensor:
    return torch.from_file(str(folder / "mapped"), shared=True, size=SIZE)


def of_numpy(folder: Path) -> torch.Tensor:
    return torch.from_numpy(np.memmap(folder / "array", np.float32, "w+", shape=(SIZE,)))


def foreign(folder: Path) -> torch.Tensor:
    """Memory that torch did not allocate, as pinned memory is."""
    return torch.frombuffer(bytearray(4 * SIZE), dtype=torch.float32)


@pytest.mark.parametrize("make", [plain, shared, mapped, of_numpy, foreign])
def test_b01_a_tensor_that_is_filled_anew_right_after_the_call(ram: Path, make: Callable[[Path], torch.Tensor]) -> None:
    tensor = make(ram)
    base = pattern(SIZE, 0).float()
    for number in range(20):
        tensor.copy_(base).add_(number)
        pending = tierload.async_save({"x": tensor, "part": tensor[5:70]}, ram / "store", settings=THROTTLED)
        tensor.fill_(-1.0)
        pending.result()
        loaded = tierload.load(ram / "store")
        assert torch.equal(loaded["x"], base + number)
        assert torch.equal(loaded["part"], loaded["x"][5:70])


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_b02_counters_of_steps_are_of_the_step_of_the_moments(store: Path, options: dict[str, Any]) -> None:
    """With the gradient 1 the first moment is 1 - 0.9 ** step."""
    parameters = [nn.Parameter(torch.zeros(4000)) for _ in range(30)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.999), **options)
    tierload.guard(optimizer)
    for number in range(1, 31):
        optimizer.step()
        tierload.async_save(optimizer, store, step=number, settings=SETTINGS)
    tierload.open(store, mode="w").close()
    for number in range(1, 31):
        state = tierload.load(store, step=number)["state"]
        assert len(state) == 30
        for each in state.values():
            assert each["step"].item() == number
            torch.testing.assert_close(each["exp_avg"], torch.full((4000,), 1 - 0.9**number))


class Fused(nn.Module):
    """Saves its one weight as three, which a hook makes anew at every save."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        weight = state.pop(prefix + "qkv")
        for name, part in zip("qkv", weight.chunk(3), strict=True):
            state[prefix + name] = part.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.qkv.T).view(-1, 3, WIDTH).sum(1)


def test_b04_tensors_that_a_hook_makes_anew_at_every_save(store: Path) -> None:
    run = Run(partial(optim.Adam, lr=0.01, fused=True), nn.Sequential(Fused(), network(), Fused()))
    tierload.guard(run.optimizer)
    storm(run, store, 16)
    first, second = (tierload.load(store, step=number)["model"]["0.q"] for number in (0, 1))
    assert not torch.equal(first, second)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, around another one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, function(*args, **kwargs))


class Open(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Open:
        return Open(inner["inner"])


def test_b06_a_tensor_without_an_address_is_saved_by_its_parts(store: Path) -> None:
    weights = [Open(torch.full((5000,), 1.0)) for _ in range(4)]
    assert {weight.data_ptr() for weight in weights} == {0}
    pending = []
    for number in range(1, 21):
        pending.append(tierload.async_save(list(weights), store, step=number, settings=SETTINGS))
        for weight in weights:
            weight.inner.add_(1)
    for number, save in enumerate(pending, 1):
        save.result()
        for weight in tierload.load(store, step=number, types=[Open]):
            assert torch.equal(weight.inner, torch.full((5000,), float(number)))


def test_b06_a_tensor_without_an_address_or_parts_is_refused(store: Path) -> None:
    state = {"fine": torch.ones(3), "layer": {"weight": Wrapper(torch.ones(5))}}
    for save in (tierload.save, tierload.async_save):
        with pytest.raises(UnsupportedValue, match=r"layer.*weight.*Wrapper"):
            save(state, store)
    del state["layer"]
    tierload.async_save(state, store).result()
    assert len(tierload.open(store).commits()) == 1


def test_a_guarded_tensor_of_a_subclass_is_copied_at_the_call(store: Path) -> None:
    weight = nn.Parameter(Open(torch.ones(50_000)), requires_grad=False)
    optimizer = optim.SGD([nn.Parameter(torch.ones(50_000)), weight], lr=1.0)
    tierload.guard(optimizer)
    pending = tierload.async_save({"w": weight}, store, settings=SETTINGS)
    weight.inner.fill_(7.0)
    pending.result()
    assert torch.equal(tierload.load(store, types=[Open])["w"].inner, torch.ones(50_000))


class InBackward(Run):
    """Every parameter has its own optimizer, which steps as soon as the gradient is there."""

    def __init__(self) -> None:
        super().__init__(partial(optim.SGD, lr=0.1))
        del self.parts["optimizer"]
        for name, parameter in self.model.named_parameters():
            optimizer = optim.Adam([parameter], lr=0.01, fused=True)
            self.parts[f"optimizer of {name}"] = optimizer
            tierload.guard(optimizer)
            parameter.register_post_accumulate_grad_hook(partial(self.update, optimizer))

    @staticmethod
    def update(optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(self) -> None:
        self.loss().backward()


def test_optimizers_that_step_in_backward(store: Path) -> None:
    run = InBackward()
    storm(run, store, 24)
    for name, part in run.parts.items():
        assert name == "model" or "in backward" in tierload.guard(part).reason


def test_optimizers_that_torch_applies_in_backward(store: Path) -> None:
    apply = pytest.importorskip("torch.distributed.optim")._apply_optimizer_in_backward
    run = Run(partial(optim.SGD, lr=0.1))
    apply(optim.Adam, run.model.parameters(), {"lr": 0.01})
    del run.parts["optimizer"]
    for name, parameter in run.model.named_parameters():
        (optimizer,) = parameter._in_backward_optimizers
        tierload.guard(optimizer)
        run.parts[f"optimizer of {name}"] = optimizer
    run.step = lambda: run.loss().backward()
    storm(run, store, 24)
    assert copy.deepcopy(run.parts["model"].state_dict()).keys() == tierload.load(store)["model"].keys()
