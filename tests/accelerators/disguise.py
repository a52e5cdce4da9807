"""States in the memory of an accelerator that there is not: tensors of the processor's, over memory in disguise."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tierload import _native

__all__ = ["Device", "assert_values", "copies"]


class Device:
    """A fake accelerator. ``moved`` are the bytes that have left its memory."""

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self.fake = _native.fake_accelerator()
        self._memory = torch.from_numpy(self.fake.allocate(nbytes))
        self._at = 0

    @property
    def moved(self) -> int:
        return self.fake.bytes_to_host

    def tensor(self, values: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """A tensor with these values; ``shift`` bytes off the alignment of others."""
        start = -(-self._at // 512) * 512 + shift
        self._at = start + values.nbytes
        place = self._memory[start : self._at].view(values.dtype).view(values.shape)
        place.copy_(values)
        return place

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The same module, with its parameters and buffers here."""
        for owner in module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None:
                    owner._parameters[name] = torch.nn.Parameter(self.tensor(parameter.detach()))
            for name, buffer in list(owner._buffers.items()):
                if buffer is not None:
                    owner._buffers[name] = self.tensor(buffer) if buffer.ndim else buffer
        return module

    def noise(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return self.tensor(torch.from_numpy(values).to(dtype))


def copies(state: object) -> object:
    """The same values elsewhere."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), state)


def assert_values(got: object, wanted: object) -> None:
    """Values alone: layouts are the state's own tests' business."""
    left, right = tree_leaves(got), tree_leaves(wanted)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
