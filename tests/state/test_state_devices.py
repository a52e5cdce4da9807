"""Tensors in an accelerator's memory are described where they are, and loaded there. The accelerator is a fake one,
whose memory the processor reads; tests/state/test_state_cuda.py has real ones."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from alike import raw
from fake_engine import bind, load, run, save, stored
from models import TinyLM
from torch import distributed as dist
from two_ways import facts_of, python_way

from tierload import _native
from tierload.state import Outline, flatten, plan_bind
from tierload.state.tensors import TORCH, device_of, is_within_reach
from tierload.types import Box

FAKE = _native.fake_accelerator()
OTHER = _native.fake_accelerator()

WAYS = pytest.mark.parametrize("way", [nullcontext, python_way], ids=["native", "python"])


def put(tensor: torch.Tensor, fake: _native.FakeAccelerator = FAKE) -> torch.Tensor:
    """A tensor like this one, in an accelerator's memory."""
    memory = torch.from_numpy(fake.allocate(tensor.numel() * tensor.element_size()))
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def devices_of(flat) -> dict[str, int]:
    return dict(zip((info.key for info in flat.chunks.infos()), flat.devices.tolist(), strict=True))


def plain(place) -> dict[str, object]:
    module = TinyLM()
    for number, parameter in enumerate(module.parameters()):
        parameter.data = place(torch.arange(float(parameter.numel())).view(parameter.shape) + number)
    weight = module.mix.weight
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight] = {"step": torch.tensor(7.0), "exp_avg": place(torch.full((6, 6), 0.5).bfloat16())}
    return {
        "module": module,
        "optimizer": optimizer,
        "list": [place(torch.arange(3)), {"z": place(torch.tensor([1 + 2j])).conj(), "cpu": torch.ones(2)}],
        "numbers": np.arange(2000),
    }


def odd(place) -> dict[str, torch.Tensor]:
    embed, flat = place(torch.arange(40.0).view(5, 8)), place(torch.arange(20.0) + 100)
    rows = place(torch.arange(6000.0).view(6, 1000))
    sparse = torch.sparse_coo_tensor(place(torch.tensor([[0, 2]])), place(torch.tensor([3.0, 4.0])), (5,))
    return {
        "embed": embed,
        "head": embed,
        "t": embed.t(),
        "x": flat[2:10],
        "y": flat[6:14].view(2, 4),
        "bytes": flat.view(torch.uint8)[61:70],
        "gaps": rows[:, ::100],
        "expanded": place(torch.tensor([5.0])).expand(3),
        "channels": place(torch.arange(120.0).view(2, 4, 5, 3)).permute(0, 3, 1, 2),
        "conj": place(torch.tensor([1 + 2j, 3j])).conj()[::1],
        "neg": torch._neg_view(place(torch.tensor([1.0, 2.0]))),
        "sparse": sparse,
        "cpu": torch.ones(2),
        "empty": flat[:0],
    }


@WAYS
def test_plain_tensors_are_described_where_they_are(way) -> None:
    state = plain(put)
    with way():
        flat, host = flatten(state), flatten(plain(lambda tensor: tensor))
    assert facts_of(flat) == facts_of(host) | {"devices": flat.devices.tolist()}
    assert flat.devices.dtype == np.uint8
    assert not host.devices.any()
    devices = devices_of(flat)
    away = {key for key in devices if "cpu" in key or key.endswith("/step") or "numbers" in key}
    assert len(away) == 3
    assert devices == {key: 0 if key in away else FAKE.number for key in devices}
    pointers = dict(zip(devices, flat.pointers.tolist(), strict=True))
    assert pointers["list/#0"] == state["list"][0].data_ptr()
    assert pointers["module/mix.weight"] == state["module"].mix.weight.data_ptr()


def test_plain_tensors_of_a_device_take_no_python_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> torch.nn.Module:
        module = torch.nn.Linear(3, 2)
        for parameter in module.parameters():
            parameter.data = put(parameter.data)
        return module

    monkeypatch.setattr(importlib.import_module("tierload.state.flatten"), "TensorLeaf", None)
    monkeypatch.setattr(importlib.import_module("tierload.state.bind"), "Fill", None)
    one, other = model(), model()
    assert flatten({"model": one, "list": [put(torch.ones(2))]}).devices.tolist() == [FAKE.number] * 3
    bind(save(one), other)
    assert raw(other.weight) == raw(one.weight)


@WAYS
def test_ties_overlaps_and_odd_layouts_on_a_device(way) -> None:
    state = odd(put)
    with way():
        flat, host = flatten(state), flatten(odd(lambda tensor: tensor))
    left_out = dict.fromkeys(("devices", "strides"))
    assert facts_of(flat) | left_out == facts_of(host) | left_out
    devices = devices_of(flat)
    assert {key for key, device in devices.items() if device == FAKE.number} >= {"embed", "bytes", "channels", "neg"}
    assert devices["cpu"] == devices["empty"] == 0
    assert not flat.strides, "what has gaps has been put together"
    pointers = dict(zip(devices, flat.pointers.tolist(), strict=True))
    assert pointers["embed"] == state["embed"].data_ptr()
    loaded = load(stored(flat))
    for key in state.keys() - {"sparse"}:
        assert raw(loaded[key]) == raw(state[key])
    assert loaded["y"].data_ptr() - loaded["x"].data_ptr() == 16


def test_a_state_may_be_on_several_devices_and_move_between_them() -> None:
    def state(first, second):
        return {"a": first(torch.ones(3)), "b": second(torch.zeros(2)), "c": torch.ones(1)}

    before = flatten(state(put, lambda tensor: put(tensor, OTHER)))
    after = flatten(state(lambda tensor: tensor, put), like=before.outline)
    assert after.chunks is before.chunks
    assert before.devices.tolist() == [FAKE.number, OTHER.number, 0]
    assert after.devices.tolist() == [0, FAKE.number, 0]


@WAYS
def test_a_load_goes_right_into_a_devices_memory(way) -> None:
    state = plain(lambda tensor: tensor)
    saved = save(state)
    into = plain(lambda tensor: put(torch.zeros_like(tensor)))
    addresses = {into["module"].mix.weight.data_ptr(), into["list"][0].data_ptr(), into["list"][1]["z"].data_ptr()}
    with way():
        plan = plan_bind(saved.document, saved.chunks, into)
        spots = plan.destinations
        assert spots.devices.tolist() == [_native.fake_at(pointer) for pointer in spots.pointers.tolist()]
        assert addresses <= set(spots.pointers.tolist())
        # The state of an optimizer that has a tensor for it, too.
        assert spots.devices.tolist().count(FAKE.number) == 8
        run(plan, saved)
    assert raw(into["module"].mix.weight) == raw(state["module"].mix.weight)
    assert raw(into["list"][1]["z"]) == raw(state["list"][1]["z"])
    (own,), (theirs,) = into["optimizer"].state.values(), state["optimizer"].state.values()
    assert raw(own["exp_avg"]) == raw(theirs["exp_avg"])
    assert int(own["step"]) == 7


def test_ties_on_a_device_are_filled_once_and_the_rest_is_copied() -> None:
    state = {key: value for key, value in odd(put).items() if key != "sparse"}
    saved = save(state)
    into = odd(lambda tensor: put(torch.zeros_like(tensor)))
    del into["sparse"]
    plan = plan_bind(saved.document, saved.chunks, into)
    devices = plan.destinations.devices.tolist()
    spots = dict(zip([saved.keys[at] for at in plan.destinations.chunks.tolist()], devices, strict=True))
    assert spots.keys() == set(saved.keys) - {"empty"}
    assert spots["embed"] == spots["channels"] == spots["bytes"] == spots["neg"] == spots["conj"] == FAKE.number
    assert spots["x"] == spots["gaps"] == spots["cpu"] == 0, "from host memory, as tensors of the processor's are"
    run(plan, saved)
    for key, value in state.items():
        assert raw(into[key]) == raw(value), key


def test_a_tensor_of_another_dtype_is_read_on_the_host() -> None:
    saved = save({"a": torch.arange(4.0)})
    into = {"a": put(torch.zeros(4, dtype=torch.float64))}
    plan = plan_bind(saved.document, saved.chunks, into, cast=True)
    assert plan.destinations.devices.tolist() == [0]
    run(plan, saved)
    assert into["a"].tolist() == [0, 1, 2, 3]


def test_chunks_of_one_tensor_on_a_device_and_one_on_the_host() -> None:
    base = torch.arange(4.0)
    saved = save({"a": base, "b": base.view(2, 2)})
    into = {"a": put(torch.zeros(4)), "b": torch.zeros(2, 2)}
    bind(saved, into)
    assert into["a"].tolist() == [0, 1, 2, 3]
    assert into["b"].tolist() == [[0, 1], [2, 3]]


def test_boxes_are_read_right_into_a_devices_memory() -> None:
    saved = save({"a": torch.arange(12.0).view(3, 4)})
    outline = Outline(saved.document, saved.chunks)
    wanted = outline.state["a"]
    targets = put(torch.zeros(2, 4)), put(torch.zeros(2, 2, dtype=torch.float64)), torch.zeros(1, 4)
    boxes = Box((1, 0), (2, 4)), Box((0, 1), (2, 2)), Box((0, 0), (1, 4))
    (plan,) = outline.plan_boxes([(wanted, box, target) for box, target in zip(boxes, targets, strict=True)])
    assert [part.device for part in plan.destinations.parts] == [FAKE.number, 0, 0]
    assert plan.destinations.parts[0].pointer == targets[0].data_ptr()


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_part_of_a_spread_tensor_is_where_it_is(mesh: dist.DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def spread(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [Shard(0)])

    local = put(torch.arange(6.0).view(3, 2))
    flat = flatten({"w": spread(local)})
    assert flat.devices.tolist() == [FAKE.number]
    assert flat.pointers.tolist() == [local.data_ptr()]
    saved = stored(flat)
    target = put(torch.zeros(3, 2))
    plan = plan_bind(saved.document, saved.chunks, {"w": spread(target)})
    (part,) = plan.destinations.parts
    assert (part.device, part.pointer) == (FAKE.number, target.data_ptr())


def test_guarded_memory_may_be_a_devices() -> None:
    tensor = put(torch.ones(1000))
    guarded = _native.GuardedMemory(TORCH, [tensor], 1)
    assert guarded.holds(np.array([tensor.data_ptr()], np.uint64), np.array([tensor.nbytes])).tolist() == [1]
    tensor.add_(1)
    assert guarded.changed().tolist() == [tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes]


@pytest.mark.skipif(not _native.accelerator_refusal(1), reason="the driver is there")
def test_a_device_without_its_driver_is_out_of_reach() -> None:
    tensor = types.SimpleNamespace(is_cpu=False, is_cuda=True, device=torch.device("cuda", 0))
    assert device_of(tensor) == 0
    assert not is_within_reach(tensor)
    assert is_within_reach(torch.ones(1))
    assert not is_within_reach(torch.ones(1, device="meta"))
