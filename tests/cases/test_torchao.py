"""B54: what torchao makes of a model and of an optimizer's state, where it is installed; no pickle anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.cases.stores import let_go
from tests.state.alike import raw
from tierload import KeyMismatch

quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)

pytestmark = [pytest.mark.filterwarnings("ignore")]

CONFIGS = {
    "int8": lambda: quantization.Int8WeightOnlyConfig(),
    "float8": lambda: quantization.Float8WeightOnlyConfig(),
    "intx": lambda: quantization.IntxWeightOnlyConfig(),
    "int8 of both": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
}


def model(seed: int, config: Any = None) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32))
    if config is not None:
        quantization.quantize_(made, config)
    return made.requires_grad_(False)


def parts(tensor: Any) -> dict[str, bytes]:
    names, _ = tensor.__tensor_flatten__()
    return {name: raw(getattr(tensor, name)) for name in names}


def classes(tensor: Any) -> list[type]:
    """The type of a tensor and the types in its context: what a load has to allow."""
    found: dict[type, None] = {type(tensor): None}
    stack = [tensor.__tensor_flatten__()[1]]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif type(value).__module__.startswith("torchao"):
            found[type(value)] = None
            stack += vars(value).values() if hasattr(value, "__dataclass_fields__") else []
    return list(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantized_model(store: Path, name: str) -> None:
    first = model(1, CONFIGS[name]())
    tierload.save({"model": first}, store)
    let_go(store)
    weight = first[0].weight
    loaded = tierload.load(store, types=classes(weight))["model"]
    assert type(loaded["0.weight"]) is type(weight)
    assert parts(loaded["0.weight"]) == parts(weight)
    x = torch.randn(3, 128)
    assigned = model(2, CONFIGS[name]())
    assigned.load_state_dict(loaded, assign=True)
    assert torch.equal(assigned(x), first(x))
    target = model(2, CONFIGS[name]())
    live = target[0].weight
    assert not torch.equal(target(x), first(x))
    tierload.load(store, into={"model": target})
    assert target[0].weight is live, "in place, and without types"
    assert parts(live) == parts(weight)
    assert torch.equal(target(x), first(x))
    plain = tierload.load(store)["model"]["0.weight"]
    assert type(plain) is dict, "nothing is rebuilt that the program did not allow"
    with pytest.raises(KeyMismatch, match=r"model/0\.weight"):
        tierload.load(store, into={"model": model(3)})
    with tierload.open(store) as opened:
        assert opened.verify(full=True).ok
    export = tierload.export_state(store, store.with_name("a.safetensors"))
    assert export.tensors >= 4


def test_the_state_of_an_8_bit_optimizer(store: Path) -> None:
    optim = pytest.importorskip("torchao.optim", exc_type=ImportError)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model(seed).requires_grad_(True)
        return made, optim.AdamW8bit(made.parameters(), lr=1e-2)

    def steps(made: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for step in range(count):
            data = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
            loss = made(data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    try:
        made, optimizer = make(1)
        steps(made, optimizer, 2)
    except Exception as error:  # noqa: BLE001 - it compiles its step, which needs a compiler and whatever else
        pytest.skip(f"torchao's optimizer does not run here: {error!r:.200}")
    tierload.save({"model": made, "optimizer": optimizer}, store)
    want = list(optimizer.state[made[0].weight].values())
    allowed = {cls for value in want if hasattr(value, "__tensor_flatten__") for cls in classes(value)}
    assert allowed
    other, fresh = make(2)
    tierload.load(store, into={"model": other, "optimizer": fresh}, types=list(allowed))
    for got, value in zip(fresh.state[other[0].weight].values(), want, strict=True):
        assert type(got) is type(value)
        if hasattr(value, "__tensor_flatten__"):
            assert parts(got) == parts(value)
    assert steps(other, fresh, 2) == steps(made, optimizer, 2)
