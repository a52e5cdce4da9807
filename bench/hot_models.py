"""Models whose first pass needs all of their weights, or only some, and what measures a hot start of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.gpt import GPT, Shape
from tierload.engine import hot_start
from tierload.engine.arriving import Arrivals

__all__ = ["EarlyExit", "Mixture", "in_arrival_order", "used_bytes"]


class EarlyExit(GPT):
    """Leaves after some of its blocks, as a token does that is sure enough."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        super().__init__(shape)
        self.taken = blocks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks[: self.taken]:
            x = block(x)
        return self.head(self.norm(x))


class _Experts(nn.Module):
    """Each token goes to the expert that the router likes best, and to no other."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        best = self.router(normed).argmax(-1)
        out = x.clone()
        for number in best.unique().tolist():
            out[best == number] += self.experts[number](normed[best == number])
        return out


class Mixture(nn.Module):
    """Layers of experts between an embedding and a head."""

    def __init__(self, layers: int, width: int, experts: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def used_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """The bytes of the parameters whose modules ``run`` calls."""
    used: dict[int, torch.Tensor] = {}

    def note(module: nn.Module, _: object) -> None:
        used.update((id(one), one) for one in module.parameters(recurse=False))

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    run()
    for handle in handles:
        handle.remove()
    return sum(one.nbytes for one in used.values())


class _Undemanding:
    """Native arrivals to which nobody says what is urgent."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def demand(self, unit: int) -> None:
        pass

    def order(self, units: Sequence[int], ranks: Sequence[int]) -> None:
        pass


class _InOrder(Arrivals):
    """Units that arrive as their keys, and so their pages in the file, follow one another."""

    def __init__(self, source: Any, units: Any, ranks: Any, *more: Any) -> None:
        order = np.argsort([unit.key for unit in units], kind="stable")
        ranks = np.empty_like(ranks)
        ranks[order] = np.arange(len(units), dtype=ranks.dtype)
        super().__init__(source, units, ranks, *more)
        self.native = _Undemanding(self.native)  # type: ignore[assignment]


@contextmanager
def in_arrival_order() -> Iterator[None]:
    """Hot starts inside know no urgency: what is first in the file arrives first, whoever waits."""
    hot_start.Arrivals = _InOrder  # type: ignore[misc]
    try:
        yield
    finally:
        hot_start.Arrivals = Arrivals  # type: ignore[misc]
