"""States whose every part tells the step, so that a copy that mixes two moments gives itself away."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

DTYPES = (torch.float32, torch.int64, torch.float64, torch.bfloat16, torch.int32)


def pattern(size: int, number: int) -> torch.Tensor:
    """Small integers without a period: no two pages of a state are equal, so that every one of them is written."""
    return torch.randint(1, 50, (size,), generator=torch.Generator().manual_seed(number))


class Stamped:
    """About ``count`` tensors of some sizes, and what else a state has, all of which ``add`` moves to the next step, in
    place wherever that is possible. Up to 200 steps, so that bfloat16 has every number
    that occurs. The numbered tensors add it to their pattern."""

    def __init__(self, sizes: tuple[int, ...], count: int = 200) -> None:
        self.step = 0
        self._patterns = [pattern(sizes[i % len(sizes)], i) for i in range(count)]
        tensors = [each.to(DTYPES[i % len(DTYPES)], copy=True) for i, each in enumerate(self._patterns)]
        wide = torch.zeros(64, 96)
        self._tensors = [*tensors, wide, torch.zeros((), dtype=torch.int64)]
        self._arrays = [np.zeros(7), np.zeros((40, 50), np.float32, order="F"), np.zeros(3000, np.int64)]
        self._bytes = [bytearray(10), bytearray(6000)]
        self._list: list[Any] = [0, [0, 0]]
        self._dict: dict[str, Any] = {}
        self._past: deque[int] = deque([0], maxlen=2)
        self.state: dict[str, Any] = {
            "step": 0,
            "tensors": tensors,
            "tied": {"first": tensors[7], "again": tensors[7], "part": tensors[7][1:]},
            "strided": [wide[:, ::3], wide.T, wide[10:20, 5:9]],
            "scalar": self._tensors[-1],
            "nested": [{"arrays": (self._arrays[0], {"more": self._arrays[1:]})}, self._list, self._dict],
            "view of an array": torch.from_numpy(self._arrays[2]),
            "strided array": self._arrays[1][::2],
            "bytes": self._bytes,
            "past": self._past,
        }

    def add(self) -> None:
        """The next step."""
        self.step += 1
        for tensor in self._tensors:
            tensor.add_(1)
        for array in self._arrays:
            array += 1
        for data in self._bytes:
            data[:] = bytes([self.step]) * len(data)
        self._list[0] = self.step
        self._list[1][:] = [self.step] * 2
        self._dict.clear()
        self._dict[f"at {self.step}"] = self.step
        self._past.append(self.step)
        self.state["step"] = self.step

    def check(self, state: Any, step: int) -> None:
        """Everything in a state that was loaded is of one step."""
        past, tensors, tied = (state.pop(key) for key in ("past", "tensors", "tied"))
        assert list(past) == [step - 1, step]
        found = {value for each, base in zip(tensors, self._patterns, strict=True) for value in values(each - base)}
        assert values(state) | found == {step}
        assert list(state["nested"][2]) == [f"at {step}"]
        assert tied["first"] is tied["again"] is tensors[7]
        assert torch.equal(tied["part"], tensors[7][1:])


def values(state: Any) -> set[float]:
    """All the numbers in a state, keys of dicts and sizes left aside."""
    if isinstance(state, torch.Tensor):
        bounds = torch.aminmax(state.detach().to(torch.float64))
        return {bounds.min.item(), bounds.max.item()} if state.numel() else set()
    if isinstance(state, np.ndarray):
        return {float(state.min()), float(state.max())}
    if isinstance(state, dict):
        state = state.values()
    if isinstance(state, bytearray | int | float):
        return set(map(float, state)) if isinstance(state, bytearray) else {float(state)}
    return set().union(*map(values, state))


class Counting:
    """Parameters and momenta of an optimizer that are a function of the number of steps: the momentum counts them, the
    parameters sum the counts, both as often as a pattern says. Small integers, so that every sum is exact."""

    def __init__(self, sizes: tuple[int, ...], count: int = 100, **options: Any) -> None:
        self._patterns = [pattern(sizes[i % len(sizes)], i).float() for i in range(count)]
        self.parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in self._patterns]
        for parameter, each in zip(self.parameters, self._patterns, strict=True):
            parameter.grad = -each
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, momentum=1.0, **options)
        self.buffer = torch.zeros(5000)
        self.steps = 0

    @property
    def state(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer.state_dict(),
            "buffer": self.buffer,
            "steps": self.steps,
        }

    def step(self) -> None:
        """What a training loop does: the forward pass changes a buffer, the step all the rest."""
        self.steps += 1
        self.buffer.add_(1)
        self.optimizer.step()

    def check(self, state: Any, steps: int) -> None:
        """Everything in a state that was loaded is as after so many steps."""
        momenta = [each["momentum_buffer"] for each in state["optimizer"]["state"].values()]
        for parameter, momentum, each in zip(state["parameters"], momenta, self._patterns, strict=True):
            assert values(momentum / each) == {-steps}
            assert values(parameter / each) == {steps * (steps + 1) / 2}
        assert values([state["buffer"], state["steps"]]) == {steps}
