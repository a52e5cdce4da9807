"""Weights that are changed between the steps, and guards that come and go."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import tierload
from tests.saves.training import WAVES, Run, assert_saved, held
from tierload import TornSave


class Large(Run):
    """96 MiB of weights."""

    def __init__(self) -> None:
        layers = [nn.Linear(512, 512, bias=False) for _ in range(96)]
        super().__init__(partial(optim.SGD, lr=0.1), nn.Sequential(*layers))
        assert not tierload.guard(self.optimizer).reason

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Without anything that has to be copied at the call."""
        return {"model": self.model.state_dict()}


def add_to_all(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def load_zeros(model: nn.Module) -> None:
    model.load_state_dict({key: torch.zeros_like(value) for key, value in model.state_dict().items()})


def clip_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)


@pytest.mark.parametrize("change", [add_to_all, load_zeros, clip_weights])
def test_surgery_tears_the_save_that_is_being_copied(store: Path, change: Callable[[nn.Module], None]) -> None:
    run = Large()
    truths = {0: copy.deepcopy(run.state())}
    tierload.async_save(run.state(), store, step=0, settings=WAVES).result()
    run.step()
    with held(store):
        pending = tierload.async_save(run.state(), store, step=1)
        change(run.model)
    with pytest.raises(TornSave, match=r"model/0\.weight.*mutating") as caught:
        pending.result()
    assert "model/95.weight" in caught.value.keys
    assert len(caught.value.keys) == 96
    truths[2] = copy.deepcopy(run.state())
    tierload.async_save(run.state(), store, step=2, settings=WAVES).result()
    assert_saved(store, truths)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_step_that_runs_no_hooks_tears_the_save(store: Path, backend: str | None) -> None:
    """Some compile what is inside torch's wrapper of the step."""
    torch.compiler.reset()
    run = Large()
    bare = partial(type(run.optimizer).step.__wrapped__, run.optimizer)
    step = bare if backend is None else torch.compile(bare, backend=backend)
    run.step()
    step()
    with held(store):
        pending = tierload.async_save(run.state(), store)
        step()
    with pytest.raises(TornSave, match="steps_elsewhere"):
        pending.result()
    with tierload.open(store) as reader:
        assert not reader.commits()


def test_surgery_on_what_is_not_saved(store: Path) -> None:
    """As with two networks that train each other, one of which is clipped."""
    run, other = Large(), Run(partial(optim.SGD, lr=0.1))
    tierload.guard(other.optimizer)
    truths = {0: copy.deepcopy(run.state())}
    with held(store):
        pending = tierload.async_save(run.state(), store, step=0)
        add_to_all(other.model)
    pending.result()
    assert_saved(store, truths)


def test_surgery_on_views_of_one_memory(store: Path) -> None:
    """The error names what is saved, though the parameters are only parts of it."""
    flat = torch.rand(24 << 20)
    parameters = [nn.Parameter(part) for part in flat.chunk(8)]
    optimizer = optim.SGD(parameters, lr=1.0)
    tierload.guard(optimizer)
    with held(store):
        pending = tierload.async_save({"flat": flat}, store)
        assert pending.copies
        with torch.no_grad():
            parameters[5].add_(1)
    with pytest.raises(TornSave) as caught:
        pending.result()
    assert list(caught.value.keys) == ["flat"]


def saved_in_waves(run: Run, store: Path, change: Callable[[tierload.PendingSave], None]) -> None:
    """Saves, has everything changed, and finds what was there at the call."""
    truths = {0: copy.deepcopy(run.state())}
    pending = tierload.async_save(run.state(), store, step=0, settings=WAVES)
    change(pending)
    pending.result()
    assert_saved(store, truths)


@pytest.mark.parametrize("change", [add_to_all, load_zeros, clip_weights])
def test_surgery_waits_when_it_is_told_to(store: Path, change: Callable[[nn.Module], None]) -> None:
    run = Large()

    def told(pending: tierload.PendingSave) -> None:
        with pending.mutating():
            change(run.model)

    saved_in_waves(run, store, told)


def test_staged_says_when_weights_may_change(store: Path) -> None:
    run = Large()

    def told(pending: tierload.PendingSave) -> None:
        pending.staged()
        add_to_all(run.model)

    saved_in_waves(run, store, told)


def test_in_waves_what_is_not_guarded_waits_for_nothing(store: Path) -> None:
    """It comes after guarded weights that do not fit, and nothing of them can be written: the call returns."""
    run = Large()
    run.state = partial(Run.state, run)  # the last part of which is unguarded
    truths = {0: copy.deepcopy(run.state())}
    with held(store):
        pending = tierload.async_save(run.state(), store, step=0, settings=WAVES)
        assert pending.copies
    with pending.mutating():
        add_to_all(run.model)
    pending.result()
    assert_saved(store, truths)


def test_a_torn_save_is_raised_by_the_next_call(store: Path) -> None:
    run = Large()
    with held(store):
        pending = tierload.async_save(run.state(), store, step=0)
        add_to_all(run.model)
    while not pending.done():
        pending.watch(0.1)
    with pytest.raises(TornSave, match=r"model/0\.weight"):
        tierload.async_save(run.state(), store, step=1, settings=WAVES)
    tierload.async_save(run.state(), store, step=2, settings=WAVES).result()
    with tierload.open(store) as reader:
        assert [commit.step for commit in reader.commits()] == [2]


def test_changes_through_data_are_the_users_own_affair(store: Path) -> None:
    """torch does not count them, so nothing can tell: who guards an optimizer promises not to do this outside of
    ``mutating()``, and inside it is fine."""
    run = Large()
    truths = {0: copy.deepcopy(run.state())}
    pending = tierload.async_save(run.state(), store, step=0, settings=WAVES)
    with pending.mutating():
        for parameter in run.model.parameters():
            parameter.data.add_(1)
    pending.result()
    assert_saved(store, truths)
    with held(store):
        broken = tierload.async_save(run.state(), store, step=1)
        for parameter in run.model.parameters():
            parameter.data.add_(1)
    broken.result()  # of no single moment: what was copied after the change has it
    rises = {
        (got - want).mean().round().item()
        for got, want in zip(tierload.load(store)["model"].values(), truths[0]["model"].values(), strict=True)
    }
    assert 2.0 in rises


def test_a_model_that_is_loaded_anew_by_assignment(store: Path) -> None:
    """The parameters are other ones from then on: those that the optimizer has are not touched."""
    run = Large()
    truths = {0: copy.deepcopy(run.state())}
    with held(store):
        pending = tierload.async_save(run.state(), store, step=0)
        zeros = {key: torch.zeros_like(value) for key, value in run.model.state_dict().items()}
        run.model.load_state_dict(zeros, assign=True)
        add_to_all(run.model)
    pending.result()
    truths[1] = copy.deepcopy(run.state())
    pending = tierload.async_save(run.state(), store, step=1, settings=WAVES)  # nobody guards the new ones
    add_to_all(run.model)
    pending.result()
    assert_saved(store, truths)


def test_a_model_that_is_deleted_after_the_call(store: Path) -> None:
    run = Large()
    truths = {0: copy.deepcopy(run.state())}
    with held(store):
        pending = tierload.async_save(run.state(), store, step=0)
        del run
        gc.collect()
        filler = [torch.full((512, 512), 7.0) for _ in range(96)]  # in its memory, if that is free
    pending.result()
    assert_saved(store, truths)
    assert len(filler) == 96


def test_weights_that_are_sent_to_another_process(store: Path) -> None:
    """torch gives their storage other memory for that and frees the old: what is read there is not saved."""
    large = nn.Parameter(torch.rand(24 << 20))  # there is no room for what comes after it
    small = nn.Parameter(torch.rand(10_000))
    optimizer = optim.SGD([large, small], lr=1.0)
    tierload.guard(optimizer)
    with held(store):
        pending = tierload.async_save({"a": large, "b": small}, store, step=0)
        small.share_memory_()
    with pytest.raises(TornSave) as caught:
        pending.result()
    assert list(caught.value.keys) == ["b"]


def test_weights_that_change_in_the_forward_pass(store: Path) -> None:
    """An embedding with ``max_norm`` scales its weight as it is used: that is told, and can be declared."""
    embedding = nn.Embedding(48 << 10, 512, max_norm=1.0)
    optimizer = optim.SGD(embedding.parameters(), lr=1.0)
    tierload.guard(optimizer)
    with held(store):
        pending = tierload.async_save(embedding, store, step=0)
        embedding(torch.arange(64))
    with pytest.raises(TornSave, match="weight"):
        pending.result()
    tierload.guard(optimizer, steps_elsewhere=True)
    truth = embedding.weight.detach().clone()
    pending = tierload.async_save(embedding, store, step=1, settings=WAVES)
    embedding(torch.arange(64, 128))
    pending.result()
    assert torch.equal(tierload.load(store)["weight"], truth)
