from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from alike import raw
from fake_engine import bind, load, run, save
from models import TinyLM
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_ways import python_way

from tierload import _native
from tierload.state import RNG, flatten, plan_bind, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def states() -> dict[str, torch.Tensor]:
    embed = torch.randn(50, 8, device="cuda")
    flat = torch.arange(20.0, device="cuda")
    return {
        "embed": embed,
        "head": embed,
        "t": embed.t(),
        "x": flat[2:10],
        "y": flat[6:14].view(2, 4),
        "bytes": flat.view(torch.uint8)[61:70],
        "gaps": torch.randn(6, 1000, device="cuda")[:, ::100],
        "cl": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        "p": torch.nn.Parameter(torch.ones(3, device="cuda")),
        "empty": torch.zeros(0, 3, device="cuda"),
        "bf16": torch.randn(4, device="cuda").bfloat16(),
        "fp8": torch.randn(4, device="cuda").to(torch.float8_e4m3fn),
        "cpu": torch.ones(2),
    }


def test_tensors_of_a_device_and_their_ties():
    state = states()
    saved = save(state)
    assert saved.nbytes == 2409
    loaded = load(saved)
    for key, value in state.items():
        assert raw(loaded[key]) == raw(value.cpu())
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr() == loaded["t"].data_ptr()
    assert loaded["y"].data_ptr() - loaded["x"].data_ptr() == 16

    into = {key: torch.zeros_like(value.detach()) for key, value in state.items()}
    other = torch.zeros(20, device="cuda")
    into |= {"head": into["embed"], "t": into["embed"].t(), "x": other[2:10], "y": other[6:14].view(2, 4)}
    into["bytes"] = other.view(torch.uint8)[61:70]
    bind(saved, into)
    for key, value in state.items():
        assert into[key].device == value.device
        assert raw(into[key].cpu()) == raw(value.cpu())


def test_tensors_of_a_device_are_described_where_they_are():
    state = states()
    flat = flatten(state)
    keys = [info.key for info in flat.chunks.infos()]
    devices, pointers = (dict(zip(keys, column.tolist(), strict=True)) for column in (flat.devices, flat.pointers))
    number = 0 if _native.accelerator_refusal(1) else 1
    assert devices == {key: 0 if key in ("cpu", "empty") else number for key in keys}
    if number:
        for key in ("embed", "x", "cl", "p", "bf16", "fp8"):
            assert pointers[key] == state[key].data_ptr(), key


def test_tensors_of_a_device_out_of_reach_are_copied_by_torch(monkeypatch):
    state = states()
    here = flatten(state)
    monkeypatch.setattr(tensors, "_number_of", lambda device: 0)
    with python_way():
        away = flatten(state)
    assert not away.devices.any()
    assert away.document == here.document
    loaded = load(save(state))
    assert all(raw(loaded[key]) == raw(value.cpu()) for key, value in state.items())


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_training_on_a_device_goes_on_alike(options):
    def train(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            tokens = torch.randint(0, 11, (16,), device="cuda")
            loss = torch.nn.functional.dropout(model(tokens), 0.3).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = TinyLM().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    train(model, optimizer, 3)
    generator = torch.Generator("cuda").manual_seed(3)
    saved = save({"model": model, "optimizer": optimizer, "rng": RNG(), "g": generator})
    want, drawn = train(model, optimizer, 5), torch.rand(2, device="cuda", generator=generator)

    other = TinyLM().cuda()
    live = torch.optim.AdamW(other.parameters(), lr=0.5, **options)
    theirs = torch.Generator("cuda")
    bind(saved, {"model": other, "optimizer": live, "rng": RNG(), "g": theirs})
    assert train(other, live, 5) == want
    assert torch.equal(torch.rand(2, device="cuda", generator=theirs), drawn)
    steps = {state["step"].device.type for state in live.state.values()}
    assert steps == {"cuda" if options else "cpu"}


class Made(TorchDispatchMode):
    """The bytes of the largest tensor in the processor's memory that comes out of an operation."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.is_cpu:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return found


class Net(torch.nn.Module):
    """With moments that are contiguous, and moments that are not."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.out = torch.nn.Linear(8, 100)
        self.to("cuda", memory_format=torch.channels_last)

    def trained(self, **options):
        optimizer = torch.optim.AdamW(self.parameters(), **options)
        for number, parameter in enumerate(self.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()
        return optimizer


@pytest.mark.skipif(bool(_native.accelerator_refusal(1)), reason="the core has no way to the device")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("way", [nullcontext, python_way], ids=["native", "python"])
def test_states_of_a_fresh_optimizer_are_made_on_the_device(options, way):
    model = Net()
    optimizer = model.trained(**options)
    saved = save({"model": model, "optimizer": optimizer})
    other = Net()
    live = torch.optim.AdamW(other.parameters())
    torch.cuda.synchronize()
    with way(), Made() as made:
        plan = plan_bind(saved.document, saved.chunks, {"model": other, "optimizer": live})
    spots = plan.destinations
    columns = (spots.chunks.tolist(), spots.pointers.tolist(), spots.devices.tolist())
    at = {saved.keys[chunk]: (pointer, device) for chunk, pointer, device in zip(*columns, strict=True)}
    on_host = {key for key, (_, device) in at.items() if not device}
    steps = {key for key in saved.keys if key.endswith("/step")}
    assert on_host == (steps if not options or "amsgrad" in options else set())
    assert made.largest <= 8, "the count of steps at most"
    run(plan, saved)
    assert live.state.keys() == set(other.parameters())
    names = {parameter: name.replace("/", "~1") for name, parameter in other.named_parameters()}
    for own, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for name, value in optimizer.state[theirs].items():
            got = live.state[own][name]
            assert (got.dtype, got.device, got.stride()) == (value.dtype, value.device, value.stride()), name
            assert raw(got.cpu()) == raw(value.cpu()), name
            assert got.data_ptr() == at[f"optimizer/state/model~1{names[own]}/{name}"][0], "nothing was moved"


@pytest.mark.skipif(bool(_native.accelerator_refusal(1)), reason="the core has no way to the device")
def test_states_of_a_device_out_of_reach_are_moved_by_torch(monkeypatch):
    model = Net()
    optimizer = model.trained()
    saved = save({"model": model, "optimizer": optimizer})
    other = Net()
    live = torch.optim.AdamW(other.parameters())
    monkeypatch.setattr(tensors, "_number_of", lambda device: 0)
    with python_way():
        bind(saved, {"model": other, "optimizer": live})
    for own, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert {name: value.device for name, value in live.state[own].items()} == {
            name: value.device for name, value in optimizer.state[theirs].items()
        }
        assert raw(live.state[own]["exp_avg"].cpu()) == raw(optimizer.state[theirs]["exp_avg"].cpu())
