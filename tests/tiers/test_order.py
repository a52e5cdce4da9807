"""The order of first use: exact where the code says it, honest where it does not, and the model is not touched."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tierload
from tierload.errors import CorruptPage, InvalidRequest
from tierload.tiers import FirstUse, ModuleCall, first_uses, of_export, of_heat, of_modules, of_step, of_trace
from tierload.types.heat import HeatTable


class Net(nn.Module):
    """Registered in another order than it is used; a tied head, a buffer, a frozen part and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 10, bias=False)
        self.unused = nn.Linear(3, 3)
        self.second = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.embed = nn.Embedding(10, 8)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8))
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.norm(self.embed(tokens).mean(1))
        hidden = self.drop(self.first(hidden))
        return self.head(self.second(hidden) * self.scale)


class Branching(nn.Module):
    """Where it goes depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(self.router(x).sum() > 0)](x)


class Selecting(nn.Module):
    """A shape in it depends on values, no branch does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (self.gate(x).squeeze(1) > 0).nonzero().squeeze(1)
        return self.last(x.index_select(0, kept))


TOKENS = torch.zeros(4, 3, dtype=torch.long)
ORDER = ["embed.weight", "norm.weight", "first.weight", "second.weight", "scale"]


def positions(found: FirstUse, names: list[str]) -> list[int]:
    return [found.positions[name] for name in names]


def table(**uses: int) -> HeatTable:
    column = np.zeros(len(uses), np.float32)
    first = np.array(list(uses.values()), np.int32)
    keys = tuple(key.replace("__", ".") for key in uses)
    return HeatTable(keys, column, column, column, column, first, {})


def snapshot(model: Net) -> dict[str, object]:
    """All that a pass could leave behind, but for what tensors hold."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "modes": [module.training for module in model.modules()],
        "hooks": [list(getattr(module, kind)) for module in model.modules() for kind in hooks],
        "tensors": {name: (id(one), one._version, one.requires_grad, id(one.grad)) for name, one in tensors.items()},
        "calls": model.calls,
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("source", [of_step, of_export])
def test_exact_sources_find_the_order(source: Callable[..., FirstUse], device: str) -> None:
    with torch.device(device):
        model = Net()
    found = source(model, (TOKENS,))
    at = positions(found, ORDER)
    assert at == sorted(set(at))
    assert at[0] == 0
    assert found.positions["head.weight"] == 0  # tied to the embedding
    assert not [name for name in found.positions if name.startswith("unused")]
    assert set(found.positions) == {*dict(model.state_dict())} - {"unused.weight", "unused.bias"}
    assert max(at) < found.kernels
    used_by = [(call.module, call.consumes) for call in found.calls]
    assert [module for module, _ in used_by] == ["", "embed", "norm", "first", "second", "head"]
    assert dict(used_by)[""] == ("scale",)
    assert dict(used_by)["first"] == ("first.weight", "first.bias") or source is of_step  # addmm has the bias first


def test_both_exact_sources_agree() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    args = (torch.zeros(2, 5, 16),)
    step, export = of_step(model, args), of_export(model, args)
    assert [(call.module, set(call.consumes)) for call in step.calls] == [
        (call.module, set(call.consumes)) for call in export.calls
    ]


def test_a_tensor_counts_with_its_consumer_and_not_with_views_of_it() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flipped = self.late.t()[:2]
            for _ in range(5):
                x = x.sin()
            return flipped @ x

    for source in (of_step, of_export):
        assert source(Views(), (torch.zeros(4, 4),)) == FirstUse(
            source.__name__[3:], {"late": 5}, 6, (ModuleCall("", 0, ("late",)),)
        )


def test_a_trace_needs_no_example() -> None:
    found = first_uses(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert (found.source, found.kernels) == ("trace", 3)
    assert found.positions == {"0.weight": 0, "0.bias": 0, "2.weight": 2, "2.bias": 2}
    assert set(found.missed) == {"step", "heat", "export"}
    model = Net()
    assert positions(of_trace(model), ORDER) == sorted(positions(of_trace(model), ORDER))


def test_what_depends_on_values_goes_by_what_was_recorded() -> None:
    model, example = Branching(), (torch.zeros(3, 4),)
    seen = {"m.router__weight": 0, "m.router__bias": 1, "m.experts__1__weight": 2, "m.experts__0__weight": -1}
    found = first_uses(model, example, table(**seen), "m.")
    assert found.source == "heat"
    assert found.positions == {"router.weight": 0, "router.bias": 1, "experts.1.weight": 2}
    assert "DataDependent" in found.missed["step"]
    assert first_uses(model, example, table(other=0), "m.").source == "modules"
    assert "'other' first" in first_uses(model, example, table(other=0)).missed["heat"]


def test_without_a_record_it_goes_by_registration_and_says_why() -> None:
    found = first_uses(Branching(), (torch.zeros(3, 4),))
    assert found.source == "modules"
    assert list(found.positions)[:2] == ["router.weight", "router.bias"]
    assert found.kernels == 3
    assert set(found.missed) == {"step", "heat", "export", "trace"}
    assert all(found.missed.values())


def test_an_export_follows_shapes_that_depend_on_values() -> None:
    found = first_uses(Selecting(), {"x": torch.zeros(3, 4)})
    assert found.source == "export"
    assert found.positions["gate.weight"] < found.positions["last.weight"]


def test_buffers_are_used_with_the_recorded_parameters_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("angles", torch.ones(2))
    model[0].lock = threading.Lock()  # so that nothing can follow it
    seen = {"0__weight": 0, "0__bias": 1, "1__weight": 2, "1__bias": 3}
    found = first_uses(model, (torch.zeros(2, 4),), table(**seen))
    assert (found.source, found.positions["1.running_mean"], found.positions["angles"]) == ("heat", 2, 0)
    assert "lock" in found.missed["step"]


def test_tied_parameters_are_recorded_under_one_name() -> None:
    model = Net()
    model.norm.lock = threading.Lock()
    found = first_uses(model, (TOKENS,), table(head__weight=3, first__weight=5))
    assert found.source == "heat"
    assert positions(found, ["head.weight", "embed.weight", "first.weight"]) == [3, 3, 5]
    assert not {"second.weight", "unused.weight", "norm.running_mean"} & set(found.positions)


def test_heat_of_other_keys_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"begins with 'model\.'"):
        of_heat(table(weight=0), "model.")


def test_an_example_that_forward_does_not_take_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Net does not take the example: missing a required argument: 'tokens'"):
        first_uses(Net(), ())
    with pytest.raises(InvalidRequest, match="the example is a Tensor; give a tuple"):
        first_uses(Net(), TOKENS)  # type: ignore[arg-type]


def test_modules_are_the_last_resort() -> None:
    found = of_modules(Net())
    assert found.positions["head.weight"] == found.positions["embed.weight"]
    assert [call.module for call in found.calls][:3] == ["", "head", "unused"]


@pytest.mark.parametrize("source", [of_step, of_export, of_trace])
def test_the_model_is_not_touched(source: Callable[..., FirstUse]) -> None:
    model = Net()
    seen: list[object] = []
    model.first.register_forward_hook(lambda *args: seen.append(args))
    model.first.register_forward_pre_hook(functools.partial(lambda lock, *args: seen.append(args), threading.Lock()))
    model(TOKENS).sum().backward()
    seen.clear()
    model.second.eval()
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    source(model) if source is of_trace else source(model, (TOKENS,))
    assert snapshot(model) == before
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert not seen


class Plain(nn.Module):
    """Uses tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.shift = torch.ones(4)
        self.held = [torch.ones(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.held, x) @ self.weight + self.shift


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_are_not_registered_are_no_obstacle(device: str) -> None:
    with torch.device(device):
        model = Plain()
    for found in (of_step(model, (torch.zeros(2, 4),)), of_trace(model)):
        assert found.positions == {"weight": 1}
    model.held.append(nn.Parameter(torch.ones(4, device=device)))
    assert of_step(model, (torch.zeros(2, 4),)).positions == {"weight": 2}
    assert first_uses(model).missed["trace"].startswith("NameError")


def test_lazy_tensors_are_not_read(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    tierload.save({"weight": torch.ones(4, 4)}, store)
    model = Plain()
    del model.weight
    lazy = tierload.load(store, lazy=True)["weight"]
    model.register_buffer("weight", lazy)
    for path in (tmp_path / "store" / "seg").iterdir():
        path.write_bytes(bytes(path.stat().st_size))  # so that a read fails
    for found in (of_step(model, (torch.zeros(2, 4),)), of_export(model, (torch.zeros(2, 4),)), of_trace(model)):
        assert found.positions == {"weight": 1}
    with pytest.raises(CorruptPage):
        lazy.materialise()


def test_a_forward_that_is_bound_to_the_original_is_not_believed() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    forward = model.forward
    model.forward = lambda x: forward(x)  # type: ignore[method-assign]
    found = first_uses(model, (torch.zeros(2, 4),))
    assert found.missed["step"].startswith("AssertionError: Please convert all Tensors to FakeTensors first")
    assert found.missed["export"] == "it finds no use of any tensor"
    assert set(found.positions) == {"0.weight", "0.bias"}


def test_hooks_that_compute_weights_are_part_of_the_model() -> None:
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    assert {"0.weight_g", "0.weight_v", "0.bias"} == set(of_step(model, (torch.zeros(2, 4),)).positions)


def test_a_model_larger_than_memory_can_be_followed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 20, 1 << 20, bias=False) for _ in range(3)))  # 12 TiB
    found = first_uses(model, (torch.zeros(1, 1 << 20, device="meta"),))
    assert found.positions == {"0.weight": 0, "1.weight": 1, "2.weight": 2}
