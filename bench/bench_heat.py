"""The heat meter: what it adds to a training's steps, and how well it and the free proxy rank curvature."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from bench.gpt import GPT, Shape
from bench.measuring import CPU, Figure, Result, Task, interleave, ratios
from bench.text import TextStream, standard_library
from tests.heat.oracles import dense_radius, spearman
from tierload.heat import HeatMeter

SHARE = 0.01
SUB_BATCH = 8  # the closure's batch is an eighth


class _Timed:
    """Seconds inside of a method of an object, and how often it was called."""

    def __init__(self, owner: object, name: str) -> None:
        self.seconds, self.calls, inner = 0.0, 0, getattr(owner, name)

        def timed(*arguments: object) -> None:
            start = time.perf_counter()
            inner(*arguments)
            self.seconds += time.perf_counter() - start
            self.calls += 1

        setattr(owner, name, timed)


class _Steps:
    """A training of the small GPT, by so many steps at once, with a meter or without one."""

    def __init__(self, shape: Shape, batch: int, metered: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.text = TextStream(standard_library(1 << 18), batch=batch, context=shape.context)
        self.seconds = 0.0
        if metered:
            words, targets = (part[: max(batch // SUB_BATCH, 1)].clone() for part in self.text.next())
            closure = (lambda: self.model.loss(words, targets)) if metered == "audits" else None
            self.meter = HeatMeter(self.model, self.optimizer, closure=closure)
            self.meter._clock = self.own_time
            self.audits = _Timed(self.meter, "_next_audit")
            self.hooks = _Timed(self.meter._locality, "enter"), _Timed(self.meter, "_on_step")
            self.optimizer._optimizer_step_post_hooks[self.meter._hook.id] = self.meter._on_step

    def run(self, steps: int) -> None:
        self._began = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model.loss(*self.text.next()).backward()
            self.optimizer.step()
        self.seconds = self.own_time()

    def own_time(self) -> float:
        """Seconds of this training, without those in which the others have their turn."""
        return self.seconds + time.perf_counter() - self._began

    def hooked(self) -> float:
        """Seconds inside of the meter's own hooks."""
        return sum(one.seconds for one in self.hooks)


def test_meter_beside_a_training(benchmark, scale, folder, keep):
    toy, real = Shape(layers=1, width=16, heads=2, context=8), Shape(layers=3, width=128, context=64)
    shape, batch, steps, rounds = real if scale.real else toy, scale.of(8, 2), scale.of(50, 2), scale.of(5, 1)
    result = Result(
        "heat-meter",
        "The heat meter beside a training",
        f"{steps} steps of a GPT of {shape.layers} layers and width {shape.width} with AdamW, batches of {batch}, in "
        "turn without a meter, with one, and with one that measures radii on an eighth of a batch (the default share). "
        f"Before it each has run {steps} steps. `audits` is the time in measurements as a part of all of that "
        "training's time; the next one waits until the last has come down to the share.",
        folder,
    )
    ways = {name: _Steps(shape, batch, metered) for name, metered in _WAYS.items()}
    for way in ways.values():
        way.run(steps)
    tasks = {name: Task(lambda way=way: way.run(steps)) for name, way in ways.items()}
    samples = interleave(benchmark, tasks, rounds=rounds)
    audited = ways["audits"]
    result.samples = samples
    for name in ways:
        result.add(Figure.of(f"{name}: a step", [value / steps * 1e3 for value in samples[name]], "ms"))
    for name in ("meter", "audits"):
        grown = [(ratio - 1) * 100 for ratio in ratios(samples[f"{name}{CPU}"], samples[f"none{CPU}"])]
        result.add(Figure.of(f"{name}: growth of a step's processor time", grown, "%"))
    hooks = ways["meter"].hooked() / ways["meter"].seconds * 100
    result.add(Figure("meter: hooks", hooks, "%", note="the time inside of them"))
    paid = (audited.audits.seconds - audited.meter._debt) / audited.seconds * 100
    note = f"{audited.audits.calls} of {sum(1 for _ in audited.model.parameters())} parameters"
    result.add(Figure("audits, but for what is left of the last", paid, "%", limit=SHARE * 100, note=note))
    result.add(Figure("audits", audited.audits.seconds / audited.seconds * 100, "%"))
    keep(result)


_WAYS = {"none": "", "meter": "plain", "audits": "audits"}


def test_meter_at_a_real_size(benchmark, scale, folder, keep):
    shape = Shape(layers=10, width=512) if scale.real else Shape(layers=1, width=16, heads=2, context=8)
    batch, steps, audits = scale.of(8, 2), scale.of(4, 2), scale.of(2, 1)
    result = Result(
        "heat-real",
        "The heat meter beside a training of a real size",
        f"{steps} steps of a GPT of {shape.layers} layers and width {shape.width} with AdamW, batches of {batch} times "
        f"{shape.context}; `hooks` is the time inside of the meter's own hooks as a part of their step, no closure. "
        "Then measurements of single radii on an eighth of a batch: the first one, which also proves that the model "
        f"can be differentiated twice, others that start from nothing, and refreshes. At a share of {SHARE:.0%} the "
        "next one comes when the last is paid for; `paid` is after how many steps.",
        folder,
    )
    way = _Steps(shape, batch, "plain")
    way.run(1)
    seconds, parts = [], []

    def run() -> None:
        for _ in range(steps):
            before, start = way.hooked(), time.perf_counter()
            way.run(1)
            seconds.append(time.perf_counter() - start)
            parts.append((way.hooked() - before) / seconds[-1] * 100)

    benchmark.pedantic(run, rounds=1)
    step = statistics.median(seconds)
    result.add(Figure("parameters", sum(one.numel() for one in way.model.parameters()) / 1e6, "million"))
    result.add(Figure.of("a step", seconds, "s"))
    result.add(Figure.of("hooks", parts, "%", limit=SHARE * 100))
    words, targets = (part[: max(batch // SUB_BATCH, 1)] for part in way.text.next())
    positions = way.meter._curvature.measurable()
    chosen = positions[:: len(positions) // (audits + 1)][: audits + 1]  # some here and there
    cost: dict[str, list[float]] = {"the first measurement": [], "measurements from nothing": [], "refreshes": []}
    for name, places in zip(cost, (chosen[:1], chosen[1:], chosen), strict=True):
        for at in places:
            start = time.perf_counter()
            way.meter._measure([at], lambda: way.model.loss(words, targets))
            cost[name].append((time.perf_counter() - start) / step)
    for name, values in cost.items():
        result.add(Figure.of(name, values, "steps"))
        result.add(Figure.of(f"{name}: paid", [value / SHARE for value in values], "steps"))
    later = statistics.median(cost["measurements from nothing"]) * (len(positions) - 1)
    whole = (cost["the first measurement"][0] + later) / SHARE
    result.add(Figure("until all are known", whole, "steps", note=f"{len(positions)} radii, by the median"))
    keep(result)


class _Small(nn.Module):
    """A language model of ``layers`` layers whose every Hessian block is small enough to be known."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "mix": nn.Linear(width, width)}
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, -1)
            x = x + layer["mix"](F.gelu(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return self.head(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_ranking_of_curvature(benchmark, scale, folder, keep):
    layers, steps, every = scale.of(5, 1), scale.of(200, 4), scale.of(50, 2)
    result = Result(
        "heat-ranking",
        "How radii and the free proxy rank the parameters of a small model",
        f"A language model of {layers} layers, trained with AdamW; every {every} steps the Hessian's block of each "
        "parameter is computed whole, and its spectral radius held against an audit of all, against what a meter with "
        "one audit at the beginning carries on, against the proxy (sums of Adam's second moments) and against the "
        "averages of gradient norms, by Spearman's correlation. `1 - Spearman` is shown: 0 is the same ranking.",
        folder,
    )
    torch.manual_seed(0)
    model = _Small(layers, width=6, words=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = _sentences(steps, words=16)
    names = [name for name, _ in model.named_parameters()]
    whole, carried = HeatMeter(model, optimizer), HeatMeter(model, optimizer)
    found: dict[str, list[float]] = {name: [] for name in ("audit", "carried on", "proxy", "gradient norm")}
    products: list[list[int]] = []
    errors: list[float] = []

    def train() -> None:
        for step, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
            if step == every:
                carried.audit(lambda: model.loss(batches[0]))
            if step % every == 0 and step > every:
                compare()

    def compare() -> None:
        exact = [dense_radius(model, name, lambda one: one.loss(batches[0])) for name in names]
        proxy = whole._proxies()
        radii = whole.audit(lambda: model.loss(batches[0]))
        products.append([radius.products for radius in radii.values()])
        errors.extend(abs(radii[name].value / true - 1) for name, true in zip(names, exact, strict=True) if true > 1e-6)
        ranks = {
            "audit": [radii[name].value for name in names],
            "carried on": carried._curvature.radii(proxy),
            "proxy": proxy,
            "gradient norm": whole._gradients.average.mean().tolist(),
        }
        for name, values in ranks.items():
            found[name].append(1 - spearman(values, exact))

    benchmark.pedantic(train, rounds=1)
    for name, values in found.items():
        result.add(Figure.of(f"{name}: 1 - Spearman", values, "", limit=0.03 if name == "audit" else None))
    result.add(Figure.of("error of a radius", [error * 100 for error in errors], "%"))
    for kind, counts in {"cold": products[:1], "warm": products[1:]}.items():
        result.add(
            Figure.of(f"{kind}: products of a radius", [count for one in counts or products for count in one], "")
        )
    result.add(
        Figure(
            "parameters",
            len(names),
            "",
            note=f"median {statistics.median(p.numel() for p in model.parameters()):g} elements",
        )
    )
    keep(result)


def _sentences(count: int, *, words: int) -> list[torch.Tensor]:
    """Batches of walks through the words, each of which is followed by few others."""
    generator = torch.Generator().manual_seed(0)
    after = torch.randint(0, words, (words, 3), generator=generator)
    batches = []
    for _ in range(count):
        walk = [torch.randint(0, words, (8,), generator=generator)]
        for _ in range(12):
            walk.append(after[walk[-1], torch.randint(0, 3, (8,), generator=generator)])
        batches.append(torch.stack(walk, 1))
    return batches
