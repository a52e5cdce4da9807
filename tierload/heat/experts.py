"""Experts that are stacked in one tensor [experts, ...]: which of them a step uses, without a call of the caller's.

Nothing is guessed. Routers choose in many ways (groups, biases, noise, capacities), so their logits do not tell; what
is handed to the experts does, and so does their gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["chosen_experts", "moved_experts", "stacked_experts"]


def stacked_experts(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """A module's own parameters that hold one expert a row: matrices one behind the other, and what else is as long
    (their biases). Layers of torch itself have none: a convolution's weight is three-dimensional too."""
    if type(module).__module__.startswith("torch."):
        return []
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    counts = {len(parameter) for parameter in own if parameter.dim() == 3 and len(parameter) > 1}
    return [parameter for parameter in own if parameter.dim() > 1 and len(parameter) in counts]


def chosen_experts(inputs: Iterable[object], stack: torch.Tensor) -> torch.Tensor | None:
    """Which experts these inputs of the module that owns ``stack`` choose: float32 [experts], 1 where used.

    Two forms are known: tokens [..., width], indices and their weights, both [..., k] (transformers); and sorted tokens
    [tokens, width] with how many each expert has, [experts] (torchtitan). An index outside of the stack is none of its
    experts: so are tokens marked that other ranks compute. None where the inputs have another form; the host waits for
    no device.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    whole = [value for value in tensors if value.dtype in (torch.int32, torch.int64)]
    floating = [value for value in tensors if value.is_floating_point()]
    tokens = [value.shape[:-1] for value in floating if value.dim() > 1 and value.shape[-1] in stack.shape[1:]]
    experts = len(stack)
    for value in whole:
        weighted = any(weights.shape == value.shape for weights in floating)
        if value.dim() > 1 and value.shape[-1] < experts and weighted and value.shape[:-1] in tokens:
            index = value.detach().reshape(-1).to(stack.device, torch.int64)
            index = torch.where((index >= 0) & (index < experts), index, experts)
            return torch.zeros(experts + 1, device=stack.device).index_fill_(0, index, 1)[:experts]
        if value.shape == (experts,) and any(len(shape) == 1 for shape in tokens):
            return (value.detach() > 0).to(stack.device, torch.float32)
    return None


def moved_experts(gradient: torch.Tensor) -> torch.Tensor:
    """Which experts have a gradient that is not all zeros: float32 [experts], 1 where so. It is read once."""
    each = gradient.detach().flatten(1)
    return (
        (each.amax(1) != 0) | (each.amin(1) != 0)
    ).float()  # on a CPU a norm by rows takes ten times as long and more
