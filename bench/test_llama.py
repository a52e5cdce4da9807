"""The state in the shape of a Llama is of the size asked for, trains, and its optimizer does what torch's does."""

from __future__ import annotations

import pytest
import torch

from bench.llama import AdamW, Llama, Shape, Training, fine_tuning, nbytes_of


@pytest.mark.parametrize("gib", [0.25, 1, 6, 70])
def test_the_size_is_that_asked_for(gib: float) -> None:
    parameters = round(gib * 2**30 / 10)
    with torch.device("meta"):
        model = Llama(Shape.of(parameters))
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_steps_learn_with_moments_in_float32() -> None:
    torch.manual_seed(0)
    run = Training.of(2 << 20, "cpu", batch=2, context=16)
    assert nbytes_of(run.plain()) == pytest.approx(2 << 20, rel=0.02)
    before = run.model.loss(run.tokens).item()
    for _ in range(10):
        run.train_step()
    assert run.model.loss(run.tokens).item() < before
    states = list(run.optimizer.state.values())
    assert {one.dtype for one in run.model.parameters()} == {torch.bfloat16}
    assert {one[name].dtype for one in states for name in ("step", "exp_avg", "exp_avg_sq")} == {torch.float32}
    assert {one["step"].item() for one in states} == {110}


def test_the_optimizer_is_torchs_where_that_can_be() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 7)) for _ in range(3)]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    pair = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad, other.grad = (gradient := torch.randn_like(one)), gradient.clone()
        for optimizer in pair:
            optimizer.step()
    assert all(map(torch.allclose, ours, theirs))
    assert [*pair[0].state_dict()["state"][0]] == [*pair[1].state_dict()["state"][0]]


def test_a_fine_tuning_leaves_its_base_alone() -> None:
    run = fine_tuning(1 << 20, "cpu", rank=4, context=16)
    before = {name: one.detach().clone() for name, one in run.model.named_parameters()}
    run.train_step()
    changed = {name for name, one in run.model.named_parameters() if not torch.equal(one, before[name])}
    assert changed
    assert all(name.endswith((".up", ".down")) for name in changed)
