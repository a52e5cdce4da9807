"""Small modules for the tests of loading into a target."""

from __future__ import annotations

import torch
from torch import nn


class TinyLM(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self, vocabulary: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.relu(self.mix(self.embed(tokens)))))


class Rotary(nn.Module):
    """A buffer that is not part of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)


class Extra(nn.Module):
    """Extra state beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.count = 0

    def get_extra_state(self) -> object:
        return {"count": self.count, "history": torch.full((2,), float(self.count))}

    def set_extra_state(self, state) -> None:
        self.count = state["count"]
        self.history = state["history"]


class Renaming(nn.Module):
    """A hook that knows an older name of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.calls = 0
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state_dict, prefix, *args) -> None:
        module.calls += 1
        if prefix + "old" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    """Losses of a few steps on fixed tokens."""
    source = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 5), generator=source)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
