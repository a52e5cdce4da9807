"""A copy of a model that computes shapes only: what runs on it needs no memory and leaves the model alone."""

from __future__ import annotations

import copy
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["StandIn", "stand_in"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class StandIn:
    """``model``: the copy, in the modes of the original, every tensor of it fake and in a storage of its own.

    ``args`` and ``kwargs`` are the example's, with fake tensors. What was on meta is on the example's device.
    """

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.mode = FakeTensorMode()
        devices = (leaf.device for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))
        self._device = next((device for device in devices if device.type != "meta"), torch.device("cpu"))
        memo: dict[int, object] = {}
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = self._fake(tensor)
            for kind in _HOOKS:
                hooks = getattr(module, kind)
                memo[id(hooks)] = _hooks_of_torch(hooks)
        with _Copying(self._fake):
            self.model = copy.deepcopy(model, memo)
        self.args: tuple[Any, ...] = tree_map_only(torch.Tensor, self._fake, args)
        self.kwargs: dict[str, Any] = tree_map_only(torch.Tensor, self._fake, dict(kwargs))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # a lazy tensor is read at its first use, and this is none
            strided = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
            device = self._device if tensor.is_meta else tensor.device
            if strided:
                with self.mode:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    known = isinstance(tensor, torch.nn.Parameter)
                    return torch.nn.Parameter(fake, tensor.requires_grad) if known else fake
        return self.mode.from_tensor(tensor, static_shapes=True)


class _Copying(TorchFunctionMode):
    """Puts fakes in the place of copies, also of tensors that are neither parameters nor buffers."""

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        if func is torch.Tensor.clone:  # of a parameter that no module has
            return self._fake(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@contextmanager
def stand_in(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[StandIn]:
    """In it the stand-in can be called. Random numbers that are drawn meanwhile are drawn again after it.

    Raises:
        TypeError: The model holds something that cannot be copied, a lock as a rule.
        RuntimeError: A tensor of it has no fake, or what is computed depends on values.
    """
    own, arrays = random.getstate(), np.random.get_state()
    log = logging.getLogger(FakeTensorMode.__module__)  # which says loudly what an exception says as well
    quiet, log.disabled = log.disabled, True
    try:
        with torch.random.fork_rng(devices=[]):
            yield StandIn(model, args, kwargs)
    finally:
        log.disabled = quiet
        random.setstate(own)
        np.random.set_state(arrays)


def _hooks_of_torch(hooks: Mapping[int, object]) -> OrderedDict[int, object]:
    """Those that compute weights, as ``torch.nn.utils.weight_norm`` does. Hooks of others must not see a pass that
    never was, and may hold what cannot be copied."""
    return OrderedDict((number, hook) for number, hook in hooks.items() if type(hook).__module__.startswith("torch."))
