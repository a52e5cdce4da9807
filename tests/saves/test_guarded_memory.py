"""What else may happen to guarded tensors while they are being copied: other memory, other processes, no optimizer."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.cases.stores import let_go
from tests.saves.stamped import values
from tests.saves.training import held
from tests.store.support import Child, in_child
from tierload import PendingSave


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.rand(1 << 18) + number) for number in range(96)]


@contextmanager
def copying(store: Path) -> Iterator[tuple[list[torch.nn.Parameter], torch.optim.Optimizer, PendingSave]]:
    """Guarded weights, and a save of them that is still being copied. What is saved is compared at the end."""
    parameters = weights()
    truth = [each.detach().clone() for each in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    assert not tierload.guard(optimizer).reason
    with held(store):
        pending = tierload.async_save({"weights": list(parameters)}, store)
        yield parameters, optimizer, pending
        assert pending.copies
    pending.result()
    del parameters, optimizer
    for got, want in zip(tierload.load(store)["weights"], truth, strict=True):
        assert torch.equal(got, want)


def other_data(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = torch.full((7,), 7.0)


def other_dtype(parameters: list[torch.nn.Parameter]) -> None:
    holder = torch.nn.Module()
    holder.weights = torch.nn.ParameterList(parameters)
    holder.half()
    assert {parameter.dtype for parameter in parameters} == {torch.float16}


def swapped(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.full((7,), 7.0)))


@pytest.mark.parametrize("change", [other_data, other_dtype, swapped])
def test_a_tensor_that_is_given_other_memory(store: Path, change: Callable[[list[Any]], None]) -> None:
    def body() -> None:
        with copying(store) as (parameters, _, _):
            change(parameters)
            gc.collect()
        let_go(store)

    outcome = in_child(body, seconds=30)
    assert not outcome.signal
    assert not outcome.error, outcome.trace


def test_weights_and_optimizer_that_nobody_has_any_more(store: Path) -> None:
    with copying(store) as (parameters, optimizer, _):
        parameters.clear()
        optimizer.param_groups.clear()
        gc.collect()


def test_a_forked_child_may_step(store: Path) -> None:
    def body(pipe: Any) -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        tierload.guard(optimizer)
        other = torch.optim.SGD(parameters[:1], lr=1.0)
        other.step()
        pipe.send(values(parameters[0] - first))

    with copying(store) as (parameters, optimizer, _):
        first = parameters[0].detach().clone()
        with Child(body) as child:
            assert child.hear() == {-2.0}


def test_a_forked_child_collects_what_saves_have_left(ram: Path) -> None:
    """Finished ones and one that is under way: the threads and the memory that they had are not the child's."""

    def body(pipe: Any) -> None:
        nonlocal pending
        mine = [torch.full((1 << 20,), 1.0) for _ in range(48)]  # where the arenas were, among other places
        pending = None
        tierload.api._writers.clear()
        gc.collect()
        mine += [torch.full((1 << 20,), 1.0) for _ in range(16)]
        pipe.send(values(mine))

    gc.disable()
    try:
        for name in ("one", "two"):
            with copying(ram / name):
                pass
            let_go(ram)
        with copying(ram / "three") as (_, _, pending), Child(body) as child:
            assert child.hear() == {1.0}
    finally:
        gc.enable()


def test_weights_that_come_into_shared_memory_later(store: Path) -> None:
    parameters = weights()[:2]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    tierload.guard(optimizer)
    for parameter in parameters:
        parameter.share_memory_()
    pending = tierload.async_save(parameters, store)
    for parameter in parameters:
        parameter.data.fill_(7.0)  # as another process would
    pending.result()
    assert 7.0 not in set().union(*map(values, tierload.load(store)))


def test_weights_that_are_shared_or_mapped_are_copied_at_the_call(tmp_path: Path) -> None:
    for tensor in (torch.ones(10).share_memory_(), torch.from_file(str(tmp_path / "w"), shared=True, size=10)):
        guard = tierload.guard(torch.optim.SGD([torch.nn.Parameter(tensor)], lr=1.0))
        assert "shared memory" in guard.reason


def test_weights_of_other_kinds_can_be_guarded(store: Path) -> None:
    sparse = torch.nn.Parameter(torch.eye(300).to_sparse())
    dense = torch.nn.Parameter(torch.ones(20_000))
    assert not tierload.guard(torch.optim.SGD([dense, sparse], lr=1.0)).reason
    pending = tierload.async_save([dense, sparse], store)
    with torch.no_grad():
        sparse._values().fill_(7.0)
    pending.result()
    assert torch.equal(tierload.load(store)[1].to_dense(), torch.eye(300))


def test_the_compiler_is_not_loaded_for_a_save() -> None:
    """It takes longer than torch itself."""
    text = "import sys, tierload; tierload.guard, tierload.async_save; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], timeout=300, check=False).returncode == 0
