"""B50, B51 and B52: empty and 0-d tensors, complex numbers, and every other dtype that this torch has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierload
from tests.cases.stores import SMALL, let_go
from tests.state.alike import assert_alike, assert_tensor, raw
from tierload import KeyMismatch, Settings, UnsupportedValue

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
SETTINGS = [Settings(), Settings(compression="off"), Settings(compression="small"), SMALL]


def of_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of any dtype with noise for content."""
    size = torch.empty(0, dtype=dtype).element_size()
    noise = np.random.default_rng(seed).integers(0, 256, size * int(np.prod(shape)), dtype=np.uint8)
    if dtype is torch.bool:
        noise &= 1
    flat = torch.from_numpy(noise)
    return (flat.view(dtype) if flat.numel() else torch.empty(0, dtype=dtype)).view(shape)


def storable(dtype: torch.dtype) -> bool:
    """Quantized ones have no tensors without a scale: test_compounds.py has those."""
    return not str(dtype).startswith("torch.q")


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros, of dtypes too that torch has no operators for."""
    zeros = torch.zeros(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    return (zeros.view(tensor.dtype) if zeros.numel() else torch.empty(0, dtype=tensor.dtype)).view(tensor.shape)


def both_ways(path: Path, state: dict[str, Any], settings: Settings) -> None:
    """Loaded plainly and into tensors of zeros."""
    tierload.save(state, path, settings=settings)
    let_go(path)
    assert_alike(tierload.load(path), state)
    target = {k: blank(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    tierload.load(path, into=target)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert raw(target[name]) == raw(value)
            assert target[name].shape == value.shape


# -- B50


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.compression}-{s.page_bytes}")
def test_b50_empty_tensors(store: Path, settings: Settings) -> None:
    state = {
        "none": torch.tensor([]),
        "a": torch.zeros(2, 0),
        "b": torch.zeros(2, 0),
        "c": torch.zeros(0, 5, dtype=torch.bfloat16),
        "big": torch.empty(0, 2**40),
        "parameter": nn.Parameter(torch.zeros(0, 3)),
    }
    both_ways(store, state, settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.compression}-{s.page_bytes}")
def test_b50_0d_of_each_dtype(store: Path, settings: Settings) -> None:
    state = {str(dtype): of_bytes(dtype, (), n) for n, dtype in enumerate(DTYPES) if storable(dtype)}
    assert len(state) >= 41
    both_ways(store, state, settings)


def test_b50_a_module_of_0d_buffers(store: Path) -> None:
    def make(value: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer("scale", torch.tensor(value))
        module.register_buffer("count", torch.tensor(int(value)))
        module.register_buffer("on", torch.tensor(bool(value)))
        return module

    tierload.save(make(3.5), store)
    module = make(0.0)
    report = tierload.load(store, into=module)
    assert_alike(module.state_dict(), make(3.5).state_dict())
    assert report.loaded == ("count", "on", "scale")
    assert all(buffer.shape == () for buffer in module.buffers())


@pytest.mark.parametrize("state", [{}, [], (), None, {"a": {}}, {"a": [[], {}]}, 0, "", nn.Module().state_dict()])
def test_b50_wholly_empty_states(store: Path, state: Any) -> None:
    for _ in range(2):
        report = tierload.save(state, store)
        assert report.raw_bytes == report.written_bytes == 0
        assert_alike(tierload.load(store), state)
    let_go(store)
    assert_alike(tierload.load(store), state)
    assert tierload.open(store).verify(full=True).ok
    if isinstance(state, dict):
        target: dict[str, Any] = {}
        tierload.load(store, into=target)
        assert target == state


# -- B51


class Rotary(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("freqs", of_bytes(torch.float32, (6, 4)).to(torch.complex64).to(dtype))
        self.weight = nn.Parameter(of_bytes(torch.int16, (5, 3)).to(torch.complex64).to(dtype))
        self.plain = nn.Linear(3, 2)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=lambda s: s.compression)
def test_b51_complex_parameters_and_buffers(store: Path, dtype: torch.dtype, settings: Settings) -> None:
    model = Rotary(dtype)
    tierload.save({"model": model}, store, settings=settings)
    let_go(store)
    found = tierload.load(store)["model"]
    for name, tensor in model.state_dict().items():
        assert raw(found[name]) == raw(tensor), name
        assert found[name].dtype is tensor.dtype
    other = Rotary(dtype)
    with torch.no_grad():
        other.weight.zero_()
        other.freqs.zero_()
    tierload.load(store, into={"model": other})
    assert raw(other.weight) == raw(model.weight)
    assert raw(other.freqs) == raw(model.freqs)


@pytest.mark.parametrize(
    "stored", [torch.complex64, torch.complex128, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
)
def test_b51_a_cast_is_for_floats_only(store: Path, stored: torch.dtype) -> None:
    """``cast=True`` into a target of bf16: floats are converted, nothing else loses its imaginary part or its bits."""
    tierload.save({"x": of_bytes(stored, (4,)), "w": torch.tensor([1.0, 2.5])}, store)
    target = {"x": torch.zeros(4, dtype=torch.bfloat16), "w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(KeyMismatch, match="x") as found:
        tierload.load(store, into=target, cast=True)
    assert found.value.dtypes == ("x",)
    assert not target["w"].any(), "nothing was changed"
    report = tierload.load(store, into=target, cast=True, strict=False)
    assert report.cast == ("w",)
    assert target["w"].tolist() == [1.0, 2.5]
    assert not target["x"].any()


def test_b51_what_cannot_be_stored_is_refused_before_anything_is_written(store: Path) -> None:
    tierload.save({"w": torch.ones(3)}, store)
    before = sorted(store.rglob("*"))
    for bad in (torch.ones(3).to_mkldnn(), nn.parameter.UninitializedParameter(), torch.empty(3, device="meta")):
        with pytest.raises(UnsupportedValue, match=r"model.*layer.*weight"):
            tierload.save({"big": torch.ones(50_000), "model": {"layer": {"weight": bad}}}, store)
    assert sorted(store.rglob("*")) == before
    assert torch.equal(tierload.load(store)["w"], torch.ones(3))


# -- B52


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 4), (300, 70)])
def test_b52_every_dtype_of_this_torch(store: Path, shape: tuple[int, ...]) -> None:
    """All round trip by each way of loading, those too for which torch has bytes and hardly an operator."""
    state: dict[str, Any] = {str(dtype): of_bytes(dtype, shape) for dtype in DTYPES if storable(dtype)}
    assert len(state) >= 41
    tierload.save(state, store)
    let_go(store)
    assert_alike(tierload.load(store), state)
    for name, tensor in state.items():
        assert_tensor(tierload.load(store, keys=name)[name], tensor)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    tierload.load(store, into=target)
    for name, tensor in state.items():
        assert raw(target[name]) == raw(tensor), name
