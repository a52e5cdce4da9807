"""What is known by other means: dense Hessians of single parameters, and models small enough for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Loss = Callable[[], torch.Tensor]


def dense_radius(model: nn.Module, name: str, loss: Callable[[nn.Module], torch.Tensor]) -> float:
    """The largest absolute eigenvalue of the whole Hessian in one parameter, by torch.autograd.functional."""
    parameter = model.get_parameter(name)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> torch.Tensor:
            return loss(self.model)

    def of(flat: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(Whole(), {f"model.{name}": flat.view(parameter.shape)}, tie_weights=True)

    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(of, parameter.detach().reshape(-1))
    return float(torch.linalg.eigvalsh(hessian).abs().max())


class Attentive(nn.Module):
    """A tiny language model with attention and dropout; its head is the embedding where that is ``tied``."""

    def __init__(self, *, tied: bool = False, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.drop(self.norm(x + seen.transpose(1, 2).reshape(x.shape))))

    def loss(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class OnceOnly(torch.autograd.Function):
    """A kernel that cannot be differentiated twice: tanh, as fused attention is."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Fused(nn.Module):
    """Two layers with such a kernel between them, or with torch's own tanh."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(OnceOnly.apply(hidden) if self.fused else hidden.tanh())


def norms(model: nn.Module) -> torch.Tensor:
    """Of the gradients as they are now."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.stack([torch.zeros(()) if one is None else one.norm() for one in gradients])


def spearman(ones: list[float], others: list[float]) -> float:
    """Correlation of ranks."""
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (ones, others)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
