"""A training state in the shape of a Llama, of a given size: what is saved and loaded on an accelerator.

torch alone is imported here: bench/gpu_snapshot.py runs where nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["AdamW", "Llama", "Shape", "Training", "fine_tuning", "nbytes_of", "tensors_in"]

TRAINED_BYTES = 10  # a parameter in bfloat16 with two moments in float32
_GRADIENTS = 4  # of which moments are made


@dataclass(frozen=True)
class Shape:
    """Four heads of queries share one of keys and values, as in Llama 3; ``inner`` is the feed-forward's width."""

    layers: int
    width: int
    inner: int

    @classmethod
    def of(cls, parameters: int) -> Shape:
        """The shape with about so many parameters: 644 millions (6 GiB of training state) are 11 layers of 2,048.

        The widest power of two that leaves room for five layers; ``inner`` takes what is then too much or too little.
        """
        width = 1 << (max(parameters // 90, 1024).bit_length() - 1) // 2
        per_layer = parameters - 2 * cls._vocabulary(width) * width
        layers = round(per_layer / (11.5 * width**2))
        inner = (per_layer / layers - 2.5 * width**2) / (3 * width)
        return cls(layers, width, max(8, round(inner / 8) * 8))

    @staticmethod
    def _vocabulary(width: int) -> int:
        return 16 * width

    @property
    def vocabulary(self) -> int:
        return self._vocabulary(self.width)

    @property
    def heads(self) -> int:
        return max(4, self.width // 64)


class Layer(nn.Module):
    """The names are those of Llama's checkpoints. Positions are left out: they have no weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.heads = shape.heads
        self.input_layernorm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // 4, bias=False)
        self.v_proj = nn.Linear(width, width // 4, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.input_layernorm(x)
        query, key, value = (
            project(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.heads // 4),
                (self.v_proj, self.heads // 4),
            )
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(seen.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Llama(nn.Module):
    """Tokens in, logits of the next ones out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    @classmethod
    def made(cls, shape: Shape, device: str, seed: int = 0) -> Llama:
        """In bfloat16; weights of N(0, 0.02), norms near one."""
        with torch.device("meta"):
            model = cls(shape).bfloat16()
        model.to_empty(device=device)
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(float(parameter.dim() == 1), 0.02, generator=generator)
        return model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class AdamW(torch.optim.AdamW):
    """torch's AdamW, its groups and the names of its states, but moments of bfloat16 weights in float32.

    torch's own would keep these in bfloat16, and refuses others. ``step`` is a tensor on the CPU, or on the weights'
    device with ``capturable=True``, as there.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            self._update([one for one in group["params"] if one.grad is not None], group)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self.state_of(one) for one in parameters]
        steps, averages, squares = ([one[name] for one in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        (beta, beta_sq), rate = group["betas"], group["lr"]
        torch._foreach_add_(steps, 1.0)
        number = steps[0] if group["capturable"] else steps[0].item()
        gradients = [one.grad.float() for one in parameters]  # type: ignore[union-attr]
        torch._foreach_lerp_(averages, gradients, 1 - beta)
        torch._foreach_mul_(squares, beta_sq)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta_sq)
        divisors = torch._foreach_div(squares, 1 - beta_sq**number)
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, group["eps"])
        changes = torch._foreach_div(averages, divisors)
        torch._foreach_mul_(changes, -rate / (1 - beta**number))
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        for parameter, change in zip(parameters, changes, strict=True):
            parameter.add_(change)

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Made at the first use, as torch does."""
        state = self.state[parameter]
        if not state:
            on_device = parameter.device if self.defaults["capturable"] else "cpu"
            state["step"] = torch.tensor(0.0, device=on_device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return state

    @torch.no_grad()
    def fill(self, step: int = 100, seed: int = 1) -> None:
        """States as after steps: moments of random gradients whose size differs from row to row, as those of rare and
        frequent tokens do, so that they compress as real ones."""
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            beta, beta_sq = group["betas"]
            for parameter in group["params"]:
                if parameter.device not in generators:
                    generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
                state, generator = self.state_of(parameter), generators[parameter.device]
                state["step"].fill_(step)
                rows = torch.empty_like(state["exp_avg"].flatten(1) if parameter.dim() > 1 else state["exp_avg"])
                sizes = rows[..., :1].clone().log_normal_(-9, 1.5, generator=generator)
                gradient = rows.view_as(parameter)
                for _ in range(_GRADIENTS):
                    rows.normal_(generator=generator).mul_(sizes)
                    state["exp_avg"].lerp_(gradient, 1 - beta)
                    state["exp_avg_sq"].mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)


class Training:
    """A model, its optimizer, and steps of it on random tokens. ``state`` is what is saved and loaded into."""

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer, *, batch: int, context: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.device = next(model.parameters()).device
        self.tokens = torch.randint(model.shape.vocabulary, (batch, context + 1), device=self.device)
        self.state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    @classmethod
    def of(
        cls, nbytes: int, device: str, *, batch: int = 8, context: int = 1024, seed: int = 0, **adamw: Any
    ) -> Training:
        """``nbytes`` of state, about: bfloat16 weights, float32 moments."""
        model = Llama.made(Shape.of(nbytes // TRAINED_BYTES), device, seed)
        optimizer = AdamW(model.parameters(), lr=3e-4, **adamw)
        optimizer.fill(seed=seed + 1)
        return cls(model, optimizer, batch=batch, context=context)

    def train_step(self) -> None:
        """Forward, backward and the optimizer's step; waits for nothing."""
        self.model.loss(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self) -> dict[str, Any]:
        """The same state as ``torch.save`` and torch.distributed.checkpoint take it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under one name, as safetensors takes them."""
        return tensors_in(self.plain())


class _Adapted(nn.Module):
    """A linear layer and a change of low rank to it, in float32."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        device = base.weight.device
        self.base = base
        self.down = nn.Parameter(torch.empty(rank, base.in_features, device=device).normal_(generator=generator))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


def fine_tuning(nbytes: int, device: str, *, rank: int = 16, batch: int = 1, context: int = 256) -> Training:
    """LoRA: a base of ``nbytes`` in bfloat16 that never changes, and adapters of its attention with their AdamW."""
    model = Llama.made(Shape.of(nbytes // 2), device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(2)
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer, name, _Adapted(getattr(layer, name), rank, generator))
    optimizer = AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    optimizer.fill()
    return Training(model, optimizer, batch=batch, context=context)


def tensors_in(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts, by their path in it."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    found: dict[str, torch.Tensor] = {}
    if isinstance(state, dict):
        for name, value in state.items():
            found |= tensors_in(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def nbytes_of(state: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(state).values())
