"""Guards that come and go, and what they are put on."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

import tierload
from tests.saves.training import SETTINGS, Run, storm
from tierload.engine import guards


def test_an_optimizer_that_is_loaded_anew(store: Path) -> None:
    run = Run(partial(optim.AdamW, lr=0.01))
    assert not tierload.guard(run.optimizer).reason
    run.step()
    state = copy.deepcopy(run.optimizer.state_dict())

    def load() -> None:
        run.optimizer.load_state_dict(copy.deepcopy(state))
        Run.step(run)

    run.step = load
    storm(run, store)


def test_parameters_that_are_added_on_the_way(store: Path) -> None:
    run = Run(partial(optim.Adam, lr=0.01, fused=True))
    assert not tierload.guard(run.optimizer).reason
    more = nn.ParameterList()
    run.parts["more"] = more

    def step() -> None:
        more.append(torch.rand(3000))
        run.optimizer.add_param_group({"params": [more[-1]], "lr": 0.1})
        run.optimizer.zero_grad()
        (run.loss() + sum(each.square().sum() for each in more)).backward()
        run.optimizer.step()

    run.step = step
    storm(run, store)


@pytest.mark.parametrize("end", ["twice", "removed", "replaced"])
def test_guards_that_come_and_go(store: Path, end: str) -> None:
    run = Run(partial(optim.Adam, lr=0.01, fused=True))
    guard = tierload.guard(run.optimizer)
    rounds = 0

    def step() -> None:
        nonlocal guard, rounds
        rounds += 1
        if rounds % 3 == 0 and end == "twice":
            guard = tierload.guard(run.optimizer)
        elif rounds % 3 == 0 and end == "removed":
            guard.remove()
            guard.remove()
        elif rounds % 3 == 0:
            run.optimizer = run.parts["optimizer"] = optim.AdamW(run.model.parameters(), lr=0.01)
            gc.collect()
        elif end == "removed":
            guard = tierload.guard(run.optimizer)
        Run.step(run)

    run.step = step
    storm(run, store, 18)


def test_inference_tensors_are_copied_at_the_call(store: Path) -> None:
    """They count no changes, so nobody could tell whether a copy beside the loop is whole."""
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(50_000), requires_grad=False)
    optimizer = optim.SGD([nn.Parameter(torch.ones(50_000)), weight], lr=1.0)
    assert not tierload.guard(optimizer).reason
    pending = tierload.async_save({"w": weight}, store, settings=SETTINGS)
    assert not pending.copies
    with torch.inference_mode():
        weight.fill_(7.0)
    pending.result()
    assert torch.equal(tierload.load(store)["w"], torch.ones(50_000))


def test_a_call_in_inference_mode(store: Path) -> None:
    run = Run(partial(optim.Adam, lr=0.01, fused=True))
    assert not tierload.guard(run.optimizer).reason
    make = run.state

    def state() -> dict[str, Any]:
        with torch.inference_mode():
            return make()

    run.state = state
    storm(run, store)


def test_optimizers_whose_step_cannot_be_waited_in() -> None:
    parameter = nn.Parameter(torch.ones(10))

    class Bare(optim.SGD):
        """Loses torch's wrapper, and with it all hooks."""

        def _patch_step_function(self) -> None:
            self._zero_grad_profile_name = ""

        def step(self, closure: Any = None) -> None:
            pass

    assert "no hooks" in tierload.guard(Bare([parameter], lr=1.0)).reason
    capturable = optim.Adam([parameter], capturable=True)
    assert not tierload.guard(capturable).reason
    capturable.param_groups[0]["params"] = [
        SimpleNamespace(is_cuda=True, is_cpu=False, _post_accumulate_grad_hooks=None)
    ]
    assert "capturable" in guards._why_not_now(capturable)
    assert "elsewhere" in tierload.guard(optim.SGD([parameter], lr=1.0), steps_elsewhere=True).reason
