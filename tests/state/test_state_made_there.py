"""What a load makes for an optimizer without states is made where torch keeps it. An accelerator is a fake one here, or
the meta device in its place; tests/state/test_state_cuda.py has real ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from alike import assert_alike, raw
from fake_engine import Saved, bind, run, save
from models import TinyLM
from test_state_devices import FAKE, put
from two_ways import python_way

from tierload import _native
from tierload.state import device_of, optimizer_states, plan_bind
from tierload.state.optimizer_states import home_of
from tierload.state.views import TensorView

WAYS = pytest.mark.parametrize("way", [nullcontext, python_way], ids=["native", "python"])

META, CPU = torch.device("meta"), torch.device("cpu")

Empty = Callable[[TensorView, torch.device], torch.Tensor]


def conv(place: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> torch.nn.Module:
    """With a weight whose elements lie in another order than its dimensions."""
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Linear(4, 4)).to(memory_format=torch.channels_last)
    for parameter in module.parameters():
        flat = place(parameter.detach().as_strided((parameter.numel(),), (1,)))
        parameter.data = flat.as_strided(parameter.shape, parameter.stride())
    return module


def stepped(module: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), **options)
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    return optimizer


def there(view: TensorView, device: torch.device) -> torch.Tensor:
    """What the fake's allocator would give: for torch its memory is the processor's, so ``device`` does not say it."""
    memory = torch.empty_strided(view.shape, view.stride, dtype=view.row.torch, device=device)
    if not memory.numel():
        return memory
    elements = put(torch.full((memory.untyped_storage().nbytes(),), 7, dtype=torch.uint8)).view(memory.dtype)
    return elements.as_strided(view.shape, view.stride)


def states_at(saved: Saved, devices: list[int], chunks: list[int]) -> dict[str, int]:
    found = {saved.keys[chunk]: device for chunk, device in zip(chunks, devices, strict=True)}
    return {key: device for key, device in found.items() if "/state/" in key}


@pytest.mark.parametrize("option", [None, "capturable", "fused"])
def test_the_count_of_steps_is_the_processors_unless_kernels_read_it(option: str | None) -> None:
    parameter, group = torch.empty(2, device=META), {} if option is None else {option: True}
    assert home_of("step", parameter, group) == (CPU if option is None else META)
    assert home_of("exp_avg", parameter, group) == META
    assert home_of("step", torch.empty(2), group) == CPU


@pytest.mark.parametrize("capturable", [False, True])
def test_each_state_is_made_on_the_device_of_its_group(monkeypatch: pytest.MonkeyPatch, capturable: bool) -> None:
    """The group as it will be: the store says whether it is capturable."""
    module = TinyLM()
    optimizer = stepped(module)
    optimizer.param_groups[0]["capturable"] = capturable
    saved = save({"m": module, "o": optimizer})
    with META:
        other = TinyLM()
    made: list[torch.device] = []

    def empty(view: TensorView, device: torch.device) -> torch.Tensor:
        made.append(device)
        return torch.empty(view.shape, dtype=view.row.torch)

    monkeypatch.setattr(optimizer_states, "device_of", lambda tensor: 1)
    monkeypatch.setattr(optimizer_states, "_empty", empty)
    plan_bind(saved.document, saved.chunks, {"m": other, "o": torch.optim.Adam(other.parameters())})
    assert made == [META if capturable else CPU, META, META] * 5


@WAYS
def test_states_are_read_right_into_an_accelerators_memory(way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_states, "_empty", there)
    module = conv()
    optimizer = stepped(module, amsgrad=True)
    optimizer.state[module[1].weight]["exp_avg"] = optimizer.state[module[1].weight]["exp_avg"].bfloat16()
    saved = save({"m": module, "o": optimizer})
    other = conv(put)
    live = torch.optim.Adam(other.parameters())
    with way():
        plan = plan_bind(saved.document, saved.chunks, {"m": other, "o": live})
        spots = plan.destinations
        at = states_at(saved, spots.devices.tolist(), spots.chunks.tolist())
        assert at == {key: FAKE.number for key in saved.keys if "/state/" in key}
        assert {saved.keys[chunk].split("/")[0] for chunk in plan.in_place} == {"m"}, "the optimizer has nothing yet"
        assert not live.state
        report = run(plan, saved)
    assert {key for key in report.loaded if "/state/" in key} == set(at)
    for own, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert list(live.state[own]) == list(optimizer.state[theirs])
        for name, value in optimizer.state[theirs].items():
            got = live.state[own][name]
            assert (device_of(got), got.data_ptr() in spots.pointers) == (FAKE.number, True)
            assert (got.dtype, got.stride(), raw(got)) == (value.dtype, value.stride(), raw(value))


def test_plain_states_are_found_by_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(3, 3)
    optimizer = stepped(module)
    saved = save({"m": module, "o": optimizer})
    other = torch.nn.Linear(3, 3)
    for parameter in other.parameters():
        parameter.data = put(parameter.data)
    monkeypatch.setattr(optimizer_states, "_empty", there)
    monkeypatch.setattr(importlib.import_module("tierload.state.bind"), "Fill", None)
    live = torch.optim.Adam(other.parameters())
    bind(saved, {"m": other, "o": live})
    assert raw(live.state[other.weight]["exp_avg"]) == raw(optimizer.state[module.weight]["exp_avg"])


@WAYS
def test_what_is_no_tensor_of_its_own_comes_by_the_processors_memory(way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_states, "_empty", there)
    module = torch.nn.Linear(3, 3)
    optimizer = stepped(module)
    flat, state = torch.arange(20.0), optimizer.state[module.weight]
    state |= {"low": flat[:9], "high": flat[5:14], "twice": state["exp_avg"], "grad": torch.ones(2, requires_grad=True)}
    state |= {"conj": torch.tensor([1 + 2j]).conj(), "none": None, "list": [torch.ones(2)], "empty": torch.empty(0, 3)}
    saved = save({"m": module, "o": optimizer})
    other = torch.nn.Linear(3, 3)
    for parameter in other.parameters():
        parameter.data = put(parameter.data)
    live = torch.optim.Adam(other.parameters())
    with way():
        bind(saved, {"m": other, "o": live})
    got = live.state[other.weight]
    assert got.keys() == state.keys()
    assert_alike(dict(sorted(got.items())), dict(sorted(state.items())))
    assert device_of(got["exp_avg"]) == device_of(live.state[other.bias]["exp_avg"]) == FAKE.number
    assert device_of(got["low"]) == device_of(got["grad"]) == 0


def test_an_accelerator_out_of_reach_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TinyLM()
    optimizer = stepped(module)
    saved = save({"m": module, "o": optimizer})
    monkeypatch.setattr(optimizer_states, "_empty", None)
    other = TinyLM()
    live = torch.optim.Adam(other.parameters())
    plan = plan_bind(saved.document, saved.chunks, {"m": other, "o": live})
    assert not plan.destinations.devices.any()
    run(plan, saved)
    assert_alike(live.state_dict(), optimizer.state_dict())


def test_memory_that_there_is_not_is_told_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(view: TensorView, device: torch.device) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optimizer_states, "_empty", empty)
    module = torch.nn.Linear(3, 3)
    saved = save({"m": module, "o": stepped(module)})
    other = torch.nn.Linear(3, 3)
    for parameter in other.parameters():
        parameter.data = put(torch.zeros_like(parameter))
    with pytest.raises(MemoryError, match=r"'o/state/m~1weight/.*CUDA out of memory"):
        plan_bind(saved.document, saved.chunks, {"m": other, "o": torch.optim.Adam(other.parameters())})
    assert not other.weight.any()
    assert _native.fake_at(other.weight.data_ptr()) == FAKE.number
