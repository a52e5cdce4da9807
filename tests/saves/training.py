"""Training loops in small: what they save, and what they do next."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierload
from tests.state.alike import assert_alike
from tierload import PendingSave, Settings

SETTINGS = Settings(page_bytes=4096, pack_below_bytes=256, compression="off", threads=1)
"""Small pages, and nearly every tensor has some of its own, which can be copied late."""

WAVES = Settings(host_budget_bytes=64 << 20, compression="off", bandwidth_cap_mbps=200)
"""The copy of more than this goes on after the call, as fast as pages are written."""

WIDTH = 96


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Nothing is written into a store: the copy of a state that is larger than ``WAVES`` allows is stopped midway."""
    store = tierload.open(path, mode="w", settings=WAVES)
    holds, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with store._turn:
            holds.set()
            ends.wait(60)  # a call that waits for the writer, as it should not, then fails its test

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def network(**more: Any) -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH, **more))


class Run:
    """A loop: ``step`` is one turn, and ``parts`` are what is saved, by name."""

    def __init__(self, optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer], model: nn.Module | None = None):
        torch.manual_seed(0)
        self.model = model if model is not None else network()
        self.optimizer = optimizer(self.model.parameters())
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.data = torch.Generator().manual_seed(1)

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(8, WIDTH, generator=self.data)).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()} | {"data": self.data}


def storm(run: Run, path: Path, rounds: int = 12, settings: Settings = SETTINGS) -> list[PendingSave]:
    """Save after each turn, go on at once, and compare what was saved with a copy of the moment of the call."""
    truths = {}
    pending = []
    for number in range(rounds):
        run.step()
        state = run.state()
        truths[number] = copy.deepcopy(state)
        pending.append(tierload.async_save(state, path, step=number, settings=settings))
        del state
        run.step()
    for save in pending:
        save.result()
    assert_saved(path, truths)
    return pending


def assert_saved(path: Path, truths: dict[int, Any]) -> None:
    """There are these commits, each of which loads as what was true at its step."""
    with tierload.open(path) as reader:
        commits = reader.commits()
        assert sorted(commit.step for commit in commits) == sorted(truths)
        for commit in commits:
            got, want = reader.load(commit=commit), truths[commit.step]
            if "data" in want:
                assert torch.equal(got.pop("data").get_state(), want.pop("data").get_state())
            assert_alike(got, want)
