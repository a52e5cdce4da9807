"""Real training steps right after each call: what is committed is what a deep copy at the call would have been."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import tierload
from tests.saves.training import WIDTH, Run, network, storm

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": partial(optim.Adam, lr=0.01, foreach=False),
    "Adam foreach": partial(optim.Adam, lr=0.01, foreach=True),
    "Adam fused": partial(optim.Adam, lr=0.01, fused=True),
    "Adam amsgrad": partial(optim.Adam, lr=torch.tensor(0.01), amsgrad=True),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "SGD": partial(optim.SGD, lr=0.01),
    "SGD momentum": partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "SGD fused": partial(optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "RMSprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
    "Adafactor": optim.Adafactor,
    "NAdam": partial(optim.NAdam, lr=0.01),
    "Rprop": optim.Rprop,
}


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(store: Path, name: str, guarded: bool) -> None:
    """With BatchNorm, whose buffers change in the forward pass."""
    run = Run(OPTIMIZERS[name])
    if guarded:
        assert not tierload.guard(run.optimizer).reason
    storm(run, store, 24 if guarded else 8)


def guarded_adam(parameters: Any) -> optim.Optimizer:
    optimizer = optim.AdamW(parameters, lr=0.01, fused=True)
    assert not tierload.guard(optimizer).reason
    return optimizer


class Closure(Run):
    def step(self) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.optimizer.step(closure)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_calls_the_model_in_its_step(store: Path, search: str | None) -> None:
    run = Closure(lambda parameters: optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn=search))
    tierload.guard(run.optimizer)
    storm(run, store, 10)


class Averaged(Run):
    """A second model is moved towards the first one, without an optimizer."""

    def __init__(self) -> None:
        super().__init__(guarded_adam)
        average = optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.parts["average"] = optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)

    def step(self) -> None:
        super().step()
        self.parts["average"].update_parameters(self.model)


class Accumulating(Run):
    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(3):
            (self.loss() / 3).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class Scheduled(Run):
    def __init__(self) -> None:
        super().__init__(guarded_adam)
        warm = optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=5)
        slow = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.parts["scheduler"] = optim.lr_scheduler.SequentialLR(self.optimizer, [warm, slow], [5])

    def step(self) -> None:
        super().step()
        self.parts["scheduler"].step()


class Scaled(Run):
    """Every fourth step is skipped, since the gradients are infinite."""

    def __init__(self) -> None:
        super().__init__(guarded_adam)
        self.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.turns = 0

    def step(self) -> None:
        self.turns += 1
        self.optimizer.zero_grad()
        scaler = self.parts["scaler"]
        scaler.scale(self.loss() * (torch.inf if self.turns % 4 == 0 else 1)).backward()
        scaler.step(self.optimizer)
        scaler.update()


class Autocast(Run):
    def loss(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss()


class TwoOptimizers(Run):
    """Of the same parameters; the one that steps first is not guarded."""

    def __init__(self) -> None:
        super().__init__(guarded_adam)
        self.parts["other"] = optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step(self) -> None:
        for optimizer in (self.parts["other"], self.optimizer):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()


def parametrized() -> nn.Module:
    model = network()
    model[3] = nn.utils.parametrizations.weight_norm(model[3])
    model[6] = nn.utils.parametrizations.spectral_norm(model[6])
    model[9] = nn.utils.parametrizations.orthogonal(model[9])
    return model


class Compiled(Run):
    def __init__(self, backend: str) -> None:
        super().__init__(guarded_adam)
        self.compiled = torch.compile(self.model, backend=backend)

    def loss(self) -> torch.Tensor:
        return self.compiled(torch.randn(8, WIDTH, generator=self.data)).square().mean()


class CompiledStep(Run):
    """The optimizer's step is compiled, before or after there is a guard that has to be asked in it."""

    def __init__(self, backend: str, when: str, **options: Any) -> None:
        super().__init__(lambda parameters: optim.AdamW(parameters, lr=0.01, **options))
        if when == "guarded first":
            tierload.guard(self.optimizer)
        self.compiled_step = torch.compile(self.optimizer.step, backend=backend)
        self.step()
        self.step()
        tierload.guard(self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.compiled_step()


RUNS: dict[str, Callable[[], Run]] = {
    "average": Averaged,
    "accumulation": partial(Accumulating, guarded_adam),
    "schedulers": Scheduled,
    "scaler": Scaled,
    "autocast": partial(Autocast, guarded_adam),
    "two optimizers": TwoOptimizers,
    "parametrizations": lambda: Run(guarded_adam, parametrized()),
}


@pytest.mark.parametrize("name", RUNS)
def test_loops(store: Path, name: str) -> None:
    storm(RUNS[name](), store, 24)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(store: Path, backend: str) -> None:
    torch.compiler.reset()
    storm(Compiled(backend), store)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("when", ["guarded first", "compiled first"])
def test_a_compiled_step(store: Path, when: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    storm(CompiledStep("aot_eager", when, **options), store)
