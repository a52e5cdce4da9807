"""The meter beside a training: what it says, that the training does not change, and how it goes on after a resume."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierload
from tests.heat.oracles import Attentive, Fused
from tierload.heat import Heat, HeatMeter

WORDS = torch.randint(0, 11, (16, 4, 9), generator=torch.Generator().manual_seed(1))


class Clock:
    """Seconds that a test says: a pass through the model takes one, and so does a step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Noisy(nn.Module):
    """All that a forward pass may change: random numbers of three kinds, BatchNorm, and buffers, in place and anew."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.first, self.norm, self.drop = Fused(fused=fused), nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.drop(self.norm(self.first(x)))
        self.last = y.detach().mean(0)
        return y + 0.01 * (random.random() + np.random.rand() + torch.rand(()))


def trained(meter_of: Callable[[nn.Module, torch.optim.Optimizer], HeatMeter | None], *, fused: bool) -> Any:
    """All that a training leaves, with a meter or without."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    model = Noisy(fused=fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    meter = meter_of(model, optimizer)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        if meter is not None and step == 3:
            meter.audit(lambda: model(torch.ones(8, 4)).square().mean())
        optimizer.step()
        losses.append(loss.item())
    tensors = [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters()), torch.rand(3)]
    modes = [module.training for module in model.modules()]
    return losses, [tensor.tolist() for tensor in tensors], modes, random.random(), np.random.rand(), meter


@pytest.mark.parametrize("fused", [False, True], ids=["double backward", "finite differences"])
def test_a_training_is_the_same_bit_for_bit_with_audits_and_without(fused: bool) -> None:
    def meter_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> HeatMeter:
        inputs = torch.linspace(-1, 1, 32).view(8, 4)
        meter = HeatMeter(model, optimizer, closure=lambda: model(inputs).square().mean(), share=1.0)
        meter._clock = Clock()  # no time passes: every step but the first measures
        return meter

    *plain, _ = trained(lambda *_: None, fused=fused)
    *metered, meter = trained(meter_of, fused=fused)
    assert metered == plain
    assert meter is not None
    assert meter._turn == 5
    assert meter.method == ("finite differences" if fused else "double backward")


class Training:
    """A small language model with its meter."""

    def __init__(self, *, tied: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Attentive(tied=tied)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.meter = HeatMeter(self.model, self.optimizer, **options)
        self.at = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.model.loss(WORDS[self.at % len(WORDS)]).backward()
            self.optimizer.step()
            self.at += 1


def test_scores_are_by_the_names_of_the_model_and_lie_in_0_to_1() -> None:
    training = Training()
    training.step(3)
    scores = training.meter.scores()
    assert list(scores) == [name for name, _ in training.model.named_parameters(remove_duplicate=False)]
    assert scores["head.weight"] is scores["words.weight"]
    for heat in scores.values():
        assert isinstance(heat, Heat)
        assert all(0 <= value <= 1 for value in heat)
        assert heat.heat == pytest.approx(0.40 * heat.gradient + 0.35 * heat.radius + 0.25 * heat.locality)
    assert max(heat.gradient for heat in scores.values()) == 1


def test_before_the_first_step_all_is_0_but_for_what_was_audited() -> None:
    training = Training()
    assert all(heat == (0, 0, 0, 0) for heat in training.meter.scores().values())
    training.meter.audit(lambda: training.model.loss(WORDS[0]))
    assert max(heat.radius for heat in training.meter.scores().values()) == 1


def test_the_gradient_term_follows_the_gradient_norms() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in ("large", "small", "none", "frozen")})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD([model["large"], model["small"], model["none"]], lr=1e-6)
    meter = HeatMeter(model, optimizer, half_lives=(1, 1, 1))

    def step(large: float, small: float) -> list[float]:
        model["large"].grad, model["small"].grad = large * torch.ones(3), small * torch.ones(3)
        optimizer.step()
        scores = meter.scores()
        return [scores[name].gradient for name in ("large", "small", "none", "frozen")]

    assert step(5, 1) == [1, pytest.approx(2 / 3), 0, 0]
    assert step(float("inf"), float("nan")) == [1, pytest.approx(2 / 3), 0, 0]  # as a gradient scaler skips
    for _ in range(6):
        last = step(1, 2)
    assert last == [pytest.approx(2 / 3), 1, 0, 0]


def test_gradients_of_a_closure_of_step_and_of_a_fused_scaled_one_are_those_of_the_loss() -> None:
    averages = []
    for way in ("plain", "closure", "scaled"):
        torch.manual_seed(0)
        model, x = Fused(fused=False), torch.randn(16, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=way == "scaled")
        meter = HeatMeter(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled")
        loss = model(x).square().mean()
        if way == "closure":
            optimizer.step(lambda loss=loss: loss.backward() or loss)
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        averages.append(meter._gradients.average.mean())
    assert averages[0].min() > 0
    assert torch.allclose(averages[1], averages[0])
    assert torch.allclose(averages[2], averages[0])


def test_weights_and_half_lives_change_while_it_runs() -> None:
    training = Training()
    training.step(2)
    training.meter.weights = (0, 0, 1)
    assert all(heat.heat == heat.locality for heat in training.meter.scores().values())
    training.meter.weights = (1, 0, 0)
    training.meter.half_lives = (1e-3, 1, 1)  # the last step alone
    training.step()
    norms = {name: float(parameter.grad.norm()) for name, parameter in training.model.named_parameters()}
    heats = {name: heat.heat for name, heat in training.meter.scores().items() if name in norms}
    assert sorted(heats, key=heats.__getitem__) == sorted(norms, key=norms.__getitem__)
    with pytest.raises(ValueError, match="sum to 1"):
        training.meter.weights = (1, 1, 1)
    with pytest.raises(ValueError, match="more than 0"):
        training.meter.half_lives = (0, 1, 1)
    assert training.meter.weights == (1, 0, 0)


def audited() -> tuple[Training, Clock, list[int]]:
    """A training whose closure takes a second of a clock, and the steps at which it was called."""
    training, clock = Training(share=0.25), Clock()
    audits: list[int] = []

    def closure() -> torch.Tensor:
        clock.now += 1
        audits.append(training.at)
        return training.model.loss(WORDS[0])

    training.meter._closure, training.meter._clock = closure, clock
    return training, clock, audits


def test_audits_come_when_the_last_one_is_paid_for() -> None:
    training, clock, audits = audited()
    for _ in range(60):
        training.step()
        clock.now += 1
    # The first measures, and proves by three passes more that it may; it costs 4 s, later ones 1 s.
    assert audits == [1] * 4 + list(range(1 + 16, 60, 4))


def test_a_long_pause_does_not_bring_many_audits() -> None:
    training, clock, audits = audited()
    training.step(2)
    clock.now += 1000
    before = len(audits)
    training.step(10)
    assert len(audits) == before + 1


def test_an_audit_needs_a_closure() -> None:
    with pytest.raises(tierload.InvalidRequest, match="needs a closure"):
        Training().meter.audit()


def test_pages_are_ranked_together_and_each_has_its_part() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(64, 4), "other": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    meter = HeatMeter(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model["other"](model["table"](torch.arange(16, 32))).square().sum().backward()
        optimizer.step()
    pages = meter.pages(page_bytes=256)  # 16 rows
    assert [len(found) for found in pages.values()] == [4, 1, 1]
    used, *rest = (pages["table.weight"][at] for at in (1, 0, 2, 3))
    for page in rest:
        assert page.gradient == page.radius == page.locality == 0
        assert used.gradient > 0
        assert used.radius > 0
        assert used.locality > 0
    assert meter.pages(1 << 20).keys() == meter.scores().keys()
    assert {name: found[0] for name, found in meter.pages(1 << 20).items()} == meter.scores()


def test_it_goes_on_from_its_state_as_if_never_interrupted(store: Path) -> None:
    whole = Training(closure=None)
    whole.step(4)
    whole.meter.audit(lambda: whole.model.loss(WORDS[0]))
    parts = {"model": whole.model, "optimizer": whole.optimizer, "heat": whole.meter, "rng": tierload.RNG()}
    tierload.save(parts, store)
    whole.step(4)
    resumed = Training()
    resumed.at = 4
    again = {"model": resumed.model, "optimizer": resumed.optimizer, "heat": resumed.meter, "rng": tierload.RNG()}
    tierload.load(store, into=again)
    resumed.step(4)
    assert resumed.meter.scores() == whole.meter.scores()
    assert resumed.meter.pages(64) == whole.meter.pages(64)
    assert resumed.meter.next_uses() == whole.meter.next_uses()


def test_a_state_of_other_parameters_is_refused() -> None:
    state = Training(tied=False).meter.state_dict()
    with pytest.raises(tierload.KeyMismatch) as caught:
        Training(tied=True).meter.load_state_dict(state)
    assert caught.value.unexpected == ("head.weight",)


def test_saves_beside_a_guarded_training_have_the_values_of_their_call(store: Path) -> None:
    training = Training(share=1.0)
    training.meter._closure, training.meter._clock = lambda: training.model.loss(WORDS[0]), Clock()
    assert tierload.guard(training.optimizer).reason == ""
    training.step(2)
    before = copy.deepcopy(training.model.state_dict())
    pending = tierload.async_save({"model": training.model, "heat": training.meter}, store)
    training.meter.audit()
    training.step(2)
    pending.durable()
    found = tierload.load(store)
    assert all(torch.equal(before[name], value) for name, value in found["model"].items())


def test_copies_of_the_model_are_not_followed() -> None:
    training = Training()
    training.step()
    before = training.meter.state_dict()["locality"]
    for other in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        other.loss(WORDS[0]).backward()
    assert training.meter.state_dict()["locality"] == before
    assert not training.meter._locality._now


def test_after_close_nothing_is_followed() -> None:
    training = Training()
    training.step()
    training.meter.close()
    before = training.meter.scores()
    training.step(3)
    assert training.meter.scores() == before


@pytest.mark.parametrize("share", [0, -1, 2, float("nan")])
def test_shares_that_make_no_sense_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share is"):
        Training(share=share)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(tierload.InvalidRequest, match="no parameters"):
        HeatMeter(nn.ReLU(), torch.optim.SGD([torch.zeros(1, requires_grad=True)]))


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(tierload.InvalidRequest, match="weight has no shape yet"):
        HeatMeter(nn.LazyLinear(3), torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
