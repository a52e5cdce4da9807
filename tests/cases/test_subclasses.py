"""B54 and B06: tensors that are more than they look are refused when they are saved, by key and type; never garbage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.cases.stores import let_go
from tests.state.alike import raw
from tierload import UnsupportedValue


class Wrapper(torch.Tensor):
    """Scaled bytes that say they are a float tensor; no memory of its own."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor) -> Wrapper:
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        out.inner, out.scale = inner, scale
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        raise NotImplementedError(str(func))


class Flattening(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *rest: Any) -> Flattening:
        return cls(inner["inner"], inner["scale"])


@pytest.mark.parametrize("kind", [Wrapper, Flattening])
@pytest.mark.parametrize("place", ["state", "module", "optimizer"])
def test_b54_subclasses_are_refused_when_they_are_saved(store: Path, kind: type[Wrapper], place: str) -> None:
    """Before anything is written. What they are made of can be stored."""
    tensor = kind(torch.randint(0, 256, (4, 4), dtype=torch.uint8), torch.ones(4))
    state: dict[str, Any] = {"quantized": tensor, "w": torch.ones(3)}
    if place == "module":
        module = nn.Module()
        module.register_buffer("quantized", tensor)
        state = {"model": module}
    elif place == "optimizer":
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.state[model.weight]["quantized"] = tensor
        state = {"model": model, "optimizer": optimizer}
    with pytest.raises(UnsupportedValue, match=rf"quantized.*{kind.__name__}"):
        tierload.save(state, store)
    assert not list(tierload.open(store).commits())
    parts = {"inner": tensor.inner, "scale": tensor.scale}
    tierload.save(parts, store)
    let_go(store)
    assert {name: raw(value) for name, value in tierload.load(store).items()} == {n: raw(v) for n, v in parts.items()}
