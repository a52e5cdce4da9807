"""Training loops that people have, saving in the background: every bit is as with saves that wait."""

from __future__ import annotations

import asyncio
import code
import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import tierload
from tests.cases.children import ROOT
from tests.saves.loop_scripts import CELLS
from tests.saves.training import SETTINGS, WIDTH, Run, network
from tests.state.alike import assert_alike


def background(state: Any, path: Path, step: int) -> None:
    tierload.async_save(state, path, step=step, settings=SETTINGS)


def foreground(state: Any, path: Path, step: int) -> None:
    tierload.save(state, path, step=step, settings=SETTINGS)


Save = Callable[[Any, Path, int], None]
Loop = Callable[[Path, Save], Any]


def assert_same(one: Path, other: Path) -> None:
    """Two stores have the same commits."""
    with tierload.open(one) as first, tierload.open(other) as second:
        steps = [commit.step for commit in first.commits()]
        assert steps == [commit.step for commit in second.commits()]
        for step in steps:
            assert_alike(first.load(step=step), second.load(step=step))


def assert_bit_identical(ram: Path, loop: Loop) -> None:
    """What the loop returns, and all that it saved, is the same with both ways of saving."""
    want = loop(ram / "foreground", foreground)
    got = loop(ram / "background", background)
    for name in ("foreground", "background"):
        tierload.open(ram / name, mode="w").close()
    assert_alike(got, want)
    assert_same(ram / "background", ram / "foreground")


def guarded(parameters: Any) -> optim.Optimizer:
    optimizer = optim.AdamW(parameters, lr=0.01)
    tierload.guard(optimizer)
    return optimizer


def turns(run: Run, path: Path, save: Save, count: int = 16) -> Any:
    losses = []
    loss_of = run.loss

    def loss() -> torch.Tensor:
        found = loss_of()
        losses.append(found.item())
        return found

    run.loss = loss
    for step in range(count):
        run.step()
        save({name: part.state_dict() for name, part in run.parts.items()} | {"losses": losses}, path, step)
    return losses, {key: value.clone() for key, value in run.model.state_dict().items()}


def compiled(backend: str, path: Path, save: Save) -> Any:
    torch.compiler.reset()
    run = Run(guarded)
    step = torch.compile(run.optimizer.step, backend=backend)
    forward = torch.compile(run.model, backend=backend)
    run.loss = lambda: forward(torch.randn(8, WIDTH, generator=run.data)).square().mean()
    run.optimizer.step = step
    return turns(run, path, save)


def scheduled(path: Path, save: Save) -> Any:
    """Accumulated gradients, a schedule, an average, dropout."""
    torch.manual_seed(0)
    run = Run(guarded, nn.Sequential(network(), nn.Dropout(0.3)))
    run.parts["schedule"] = schedule = optim.lr_scheduler.OneCycleLR(run.optimizer, 0.05, total_steps=40)
    run.parts["average"] = average = optim.swa_utils.AveragedModel(run.model, use_buffers=True)

    def step() -> None:
        run.optimizer.zero_grad()
        for _ in range(2):
            run.loss().backward()
        run.optimizer.step()
        schedule.step()
        average.update_parameters(run.model)

    run.step = step
    return turns(run, path, save)


@pytest.mark.parametrize(
    "loop",
    [
        lambda path, save: turns(Run(guarded), path, save),
        scheduled,
        partial(compiled, "eager"),
        partial(compiled, "aot_eager"),
    ],
    ids=["plain", "scheduled", "compiled", "compiled with autograd"],
)
def test_loops(ram: Path, loop: Loop) -> None:
    assert_bit_identical(ram, loop)


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Its workers collect garbage: what they were born with, from saves too."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 8 == 0:
            gc.collect()
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def loading(persistent: bool, path: Path, save: Save) -> Any:
    run = Run(guarded)
    loader = torch.utils.data.DataLoader(
        Data(), batch_size=8, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent
    )
    step = 0
    for _ in range(4):
        for batch in loader:
            run.optimizer.zero_grad()
            run.model(batch).square().mean().backward()
            run.optimizer.step()
            save({name: part.state_dict() for name, part in run.parts.items()}, path, step)
            step += 1
    return {key: value.clone() for key, value in run.model.state_dict().items()}


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader_that_are_forked_while_saves_are_in_flight(ram: Path, persistent: bool) -> None:
    assert_bit_identical(ram, partial(loading, persistent))


def test_a_loop_under_asyncio(ram: Path) -> None:
    async def main(path: Path, save: Save) -> Any:
        run = Run(guarded)
        for step in range(16):
            run.step()
            state = {name: part.state_dict() for name, part in run.parts.items()}
            if save is background and step % 3 == 0:
                await tierload.async_save(state, path, step=step, settings=SETTINGS)
            else:
                save(state, path, step)
            await asyncio.sleep(0)
        return {key: value.clone() for key, value in run.model.state_dict().items()}

    assert_bit_identical(ram, lambda path, save: asyncio.run(main(path, save)))


def names(path: Path, saving: str, workers: int) -> dict[str, Any]:
    return {"__name__": "__console__", "path": str(path), "saving": saving, "workers": workers}


def test_cells_of_a_notebook(ram: Path) -> None:
    models = []
    for saving in ("save", "async_save"):
        console = code.InteractiveInterpreter(names(ram / saving, saving, 0))
        for cell in CELLS:
            compiled_cell = code.compile_command(cell + "\n", symbol="exec")
            assert compiled_cell is not None
            before = getattr(sys, "last_value", None)
            console.runcode(compiled_cell)
            assert getattr(sys, "last_value", None) is before, "the cell failed"
        tierload.open(ram / saving, mode="w").close()
        models.append(console.locals["model"].state_dict())
    assert_alike(models[1], models[0])
    assert_same(ram / "async_save", ram / "save")


@pytest.mark.parametrize("way", ["stdin", pytest.param("-c", marks=pytest.mark.slow)])
def test_a_script_without_a_main_guard(ram: Path, way: str) -> None:
    for saving in ("save", "async_save"):
        lines = [f"{name} = {value!r}" for name, value in names(ram / saving, saving, 2).items() if name != "__name__"]
        text = "\n".join([*lines, *(cell for cell in CELLS if "result" not in cell)])
        command = [sys.executable, "-"] if way == "stdin" else [sys.executable, "-c", text]
        done = subprocess.run(
            command,
            input=text if way == "stdin" else "",
            cwd=ROOT,
            text=True,
            timeout=300,
            check=False,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
    assert_same(ram / "async_save", ram / "save")
    with tierload.open(ram / "async_save") as reader:
        assert len(reader.commits()) == 15
