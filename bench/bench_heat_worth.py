"""What the radius term of heat is worth: what it moves, and what a user feels of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench.conftest import Scale
from bench.gpt import GPT, Shape
from bench.measuring import Figure, Result
from bench.text import TextStream, standard_library
from tests.heat.oracles import spearman
from tierload.heat import Heat, HeatMeter

HOT = 0.25  # the part of all bytes that is held hot
PAGE_BYTES = 1024  # these models are small
BITS = 2
WAYS = {  # weights of gradient, of the proxy, of the audited radius, of locality
    "heat without radius": (0.40, 0, 0, 0.25),
    "heat with the proxy": (0.40, 0.35, 0, 0.25),
    "heat with audits": (0.40, 0, 0.35, 0.25),
    "gradient alone": (1, 0, 0, 0),
    "proxy alone": (0, 1, 0, 0),
    "audits alone": (0, 0, 1, 0),
}


class Unit(NamedTuple):
    """A parameter, or a page of one, and its heat before and after an audit of all."""

    flat: torch.Tensor  # a view of the parameter's own memory
    before: Heat
    after: Heat


@dataclass
class Trained:
    """A model after its training; ``loss`` is of data that it has not seen."""

    model: nn.Module
    meter: HeatMeter
    closure: Callable[[], torch.Tensor]
    loss: Callable[[], torch.Tensor]


class Residual(nn.Module):
    """A small residual network for pictures of one channel."""

    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.GELU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.gelu(x + block(x))
        return self.head(x.mean((2, 3)))


def _train(
    model: nn.Module, batch: Callable[[], torch.Tensor], steps: int, closure: Callable, loss: Callable
) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    meter = HeatMeter(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        batch().backward()
        optimizer.step()
    model.eval()
    return Trained(model, meter, closure, loss)


def _gpt(seed: int, scale: Scale) -> Trained:
    torch.manual_seed(seed)
    shape = Shape(layers=4, width=96, heads=4, context=64) if scale.real else Shape(1, 16, 2, 8)
    model = GPT(shape)
    seen = TextStream(standard_library(1 << 20), batch=scale.of(8, 2), context=shape.context)
    unseen = TextStream(standard_library(3 << 20)[2 << 20 :], batch=scale.of(32, 2), context=shape.context)
    fixed, held = [part[: scale.of(2, 1)] for part in seen.next()], unseen.next()
    return _train(
        model, lambda: model.loss(*seen.next()), scale.of(250, 2), lambda: model.loss(*fixed), lambda: model.loss(*held)
    )


def _residual(seed: int, scale: Scale) -> Trained:
    torch.manual_seed(seed)
    model = Residual(scale.of(24, 4), scale.of(4, 1), classes=12)
    fixed, held = _gratings(scale.of(8, 2)), _gratings(scale.of(192, 4))

    def loss(pictures: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(pictures), classes)

    return _train(
        model, lambda: loss(*_gratings(scale.of(16, 4))), scale.of(200, 2), lambda: loss(*fixed), lambda: loss(*held)
    )


def _gratings(count: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy waves of 12 directions, each of any wavelength and phase."""
    classes = torch.randint(0, 12, (count,))
    angle, phase = classes * torch.pi / 12, torch.rand(count) * 2 * torch.pi
    length = 0.5 + torch.rand(count)
    places = torch.arange(size, dtype=torch.float32)
    along = places[:, None] * angle.sin()[:, None, None] + places * angle.cos()[:, None, None]
    waves = (along * length[:, None, None] + phase[:, None, None]).sin()
    return (waves + 0.7 * torch.randn(count, size, size))[:, None], classes


def _units(trained: Trained) -> dict[str, list[Unit]]:
    """All parameters, and all their pages."""
    kinds = {"parameters": 1 << 40, "pages": PAGE_BYTES}
    before = {kind: trained.meter.pages(page_bytes) for kind, page_bytes in kinds.items()}
    trained.meter.audit(trained.closure)
    after = {kind: trained.meter.pages(page_bytes) for kind, page_bytes in kinds.items()}
    return {
        kind: [
            Unit(part, *heats)
            for name, parameter in trained.model.named_parameters()
            for part, *heats in zip(
                parameter.detach().view(-1).split(page_bytes // 4), before[kind][name], after[kind][name], strict=True
            )
        ]
        for kind, page_bytes in kinds.items()
    }


def _scores(units: Sequence[Unit], weights: Sequence[float]) -> list[float]:
    gradient, proxy, audit, locality = weights
    return [
        gradient * one.before.gradient + proxy * one.before.radius + audit * one.after.radius
        + locality * one.before.locality
        for one in units
    ]  # fmt: skip


def _hottest(units: Sequence[Unit], scores: Sequence[float], part: float) -> set[int]:
    """The hottest units that find room in this part of the bytes, one after the other."""
    room = part * sum(one.flat.nbytes for one in units)
    found = set()
    for at in sorted(range(len(units)), key=lambda at: -scores[at]):
        if units[at].flat.nbytes <= room:
            room -= units[at].flat.nbytes
            found.add(at)
    return found


def _growth(trained: Trained, units: Sequence[Unit], chosen: set[int], change: Callable) -> float:
    """By how much the loss grows when these units are changed."""
    kept = {at: units[at].flat.clone() for at in chosen}
    with torch.no_grad():
        before = float(trained.loss())
        for at in chosen:
            units[at].flat.copy_(change(units[at].flat))
        after = float(trained.loss())
        for at, values in kept.items():
            units[at].flat.copy_(values)
    return after - before


def _quantised(values: torch.Tensor) -> torch.Tensor:
    step = values.abs().max().clamp(min=1e-12) / (2 ** (BITS - 1) - 1)
    return (values / step).round() * step


CHANGES = {  # of the coldest part of the bytes
    f"half to {BITS} bits": (0.5, _quantised),
    "half to zeros": (0.5, torch.zeros_like),
    "a tenth to zeros": (0.1, torch.zeros_like),
}


@pytest.mark.parametrize(("name", "of"), [("gpt", _gpt), ("residual", _residual)])
def test_what_the_radius_adds(benchmark, name: str, of: Callable, scale: Scale, folder: Path, keep) -> None:
    seeds = range(scale.of(3, 1))
    result = Result(
        f"heat-worth-{name}",
        f"What the radius term of heat moves, and what is felt of it ({name})",
        f"{len(seeds)} trainings of a small model with AdamW; then its parameters, and their pages of {PAGE_BYTES} "
        "bytes, are ranked by heat without the radius, with the proxy for it (Adam's second moments), with an audit, "
        f"and by single terms. `kept` is how much of the hottest {HOT:.0%} of the bytes are the same bytes as "
        "without the radius (as with audits for the last); `loss` is by how much the loss of unseen data grows when "
        f"the coldest part of the bytes is rounded to {BITS} bits or set to zero: small is good. `chance` is a random "
        "order.",
        folder,
    )
    found: dict[str, list[float]] = {}

    def measure() -> None:
        for seed in seeds:
            trained = of(seed, scale)
            for kind, units in _units(trained).items():
                for what, value in _worth(trained, units).items():
                    found.setdefault(f"{kind}: {what}", []).append(value)

    benchmark.pedantic(measure, rounds=1)
    for what, values in found.items():
        result.add(Figure.of(what, values, "%" if "kept" in what else ""))
    keep(result)


def _worth(trained: Trained, units: Sequence[Unit]) -> dict[str, float]:
    scores = {way: _scores(units, weights) for way, weights in WAYS.items()}
    without, proxy, audits = (_hottest(units, scores[way], HOT) for way in list(WAYS)[:3])
    found = {
        "units": float(len(units)),
        "proxy and radii: Spearman": spearman(scores["proxy alone"], scores["audits alone"]),
        "heat with audits and without radius: Spearman": spearman(
            scores["heat with audits"], scores["heat without radius"]
        ),
        "kept with audits": _kept(units, audits, without),
        "kept with the proxy": _kept(units, proxy, without),
        "kept with the proxy, of audits": _kept(units, proxy, audits),
    }
    chance = [torch.randperm(len(units), generator=torch.Generator().manual_seed(n)).tolist() for n in range(5)]
    everything = set(range(len(units)))
    for what, (part, change) in CHANGES.items():
        for way, values in scores.items():
            cold = everything - _hottest(units, values, 1 - part)
            found[f"loss, {what}, {way}"] = _growth(trained, units, cold, change)
        growths = [_growth(trained, units, everything - _hottest(units, order, 1 - part), change) for order in chance]
        found[f"loss, {what}, chance"] = statistics.median(growths)
    return found


def _kept(units: Sequence[Unit], ones: set[int], others: set[int]) -> float:
    """How much of the bytes of ``others`` are among ``ones``, in percent."""
    return 100 * sum(units[at].flat.nbytes for at in ones & others) / (sum(units[at].flat.nbytes for at in others) or 1)
