"""What tests of hot starts share: models, stores of them, and arrivals that wait for a word."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.state.alike import assert_alike
from tests.store.support import damage_byte
from tierload import Settings
from tierload.engine.arriving import Arrivals
from tierload.engine.loading import table_of

SMALL = Settings(page_bytes=4096, pack_below_bytes=256)
LONG_S = 60


class Block(nn.Module):
    """Attention, a recurrence, norms with buffers: modules that reach their tensors in different ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.recurrence = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.recurrence(x)[0]
        return self.norm(x.flatten(0, 1)).view_as(x) * self.scale


class Model(nn.Module):
    """Words in and out by one tied tensor, and blocks between."""

    def __init__(self, blocks: int = 2, width: int = 32, words: int = 100) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


WORDS = torch.arange(24).view(2, 12)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step of a training; its loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(WORDS).flatten(0, 1), WORDS.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def fresh(seed: int = 1) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=seed * 1e-3)


def trained(path: Path, **more: Any) -> tuple[Model, torch.optim.AdamW]:
    """A model that was trained a little and saved."""
    model, optimizer = fresh()
    for _ in range(2):
        step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer, **more}, path, step=2, settings=SMALL)
    return model, optimizer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same state, bit for bit, in ordinary tensors."""
    assert_alike(dict(one.state_dict()), dict(other.state_dict()))
    for tensor in (*other.parameters(), *other.buffers()):
        assert type(tensor) in (nn.Parameter, torch.Tensor)


@contextmanager
def held(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing arrives in a hot start that begins inside, until the event is set or the block ends."""
    go = threading.Event()
    work = Arrivals._work
    patch.setattr(Arrivals, "_work", lambda self: (go.wait(LONG_S), work(self)))
    try:
        yield go
    finally:
        go.set()
        patch.setattr(Arrivals, "_work", work)


def damage(path: Path, key: str) -> None:
    """Flips a bit in the first page of a tensor of the newest commit."""
    with tierload.open(path) as store:
        manifest = store._native.manifest(store.find().txid)
        table = table_of(manifest)
        row = table.pages[int(table.rows[store.info(key).number]["first_page"])]
        damage_byte(path / manifest.segment_path(int(row["segment"])), int(row["offset"]) + 5)
