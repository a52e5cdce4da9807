"""B54 and B06: tensor subclasses are stored by their parts, or refused by key and type; never garbage."""

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


def holding(kind: type[Wrapper], place: str) -> tuple[dict[str, Any], Wrapper]:
    """A state with such a tensor somewhere in it."""
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
    return state, tensor


@pytest.mark.parametrize("place", ["state", "module", "optimizer"])
def test_b54_subclasses_that_do_not_flatten_are_refused_when_they_are_saved(store: Path, place: str) -> None:
    """Before anything is written. What they are made of can be stored."""
    state, tensor = holding(Wrapper, place)
    with pytest.raises(UnsupportedValue, match=r"quantized.*Wrapper"):
        tierload.save(state, store)
    assert not list(tierload.open(store).commits())
    parts = {"inner": tensor.inner, "scale": tensor.scale}
    tierload.save(parts, store)
    let_go(store)
    assert {name: raw(value) for name, value in tierload.load(store).items()} == {n: raw(v) for n, v in parts.items()}


@pytest.mark.parametrize("place", ["state", "module", "optimizer"])
def test_b06_those_that_flatten_come_back_bit_for_bit(store: Path, place: str) -> None:
    state, tensor = holding(Flattening, place)
    tierload.save(state, store)
    let_go(store)
    loaded = tierload.load(store, types=[Flattening])
    found = {"state": loaded, "module": loaded.get("model")}.get(place)
    if place == "optimizer":
        found = loaded["optimizer"]["state"][0]
    assert type(found["quantized"]) is Flattening
    assert raw(found["quantized"].inner) == raw(tensor.inner)
    assert raw(found["quantized"].scale) == raw(tensor.scale)
    target, live = holding(Flattening, place)
    inner = live.inner
    inner.zero_(), live.scale.zero_()
    tierload.load(store, into=target)
    assert live.inner is inner, "filled in place"
    assert raw(live.inner) == raw(tensor.inner)
    assert raw(live.scale) == raw(tensor.scale)
    assert tierload.open(store).verify(full=True).ok
