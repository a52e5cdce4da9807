"""A small GPT in plain torch: what the demonstration trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["GPT", "Shape"]


@dataclass(frozen=True)
class Shape:
    """``vocabulary`` is 256: the tokens are bytes."""

    layers: int = 6
    width: int = 368
    heads: int = 8
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.mix = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(width, 2))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.mix(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.norm_2(x)))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Input and output embedding are one tensor, as in GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
