"""B87, B89 and B90: optimizer states go to the parameters that they belong to, bit for bit, and only there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.cases.stores import let_go, stored_keys
from tests.state.alike import assert_alike
from tierload import KeyMismatch

Optimizer = torch.optim.Optimizer


class Two(nn.Module):
    """Two layers of one shape, defined in either order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("first", "second"):
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def step(model: nn.Module, optimizer: Optimizer, times: int = 3, seed: int = 0) -> list[float]:
    source = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(times):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, generator=source)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Every parameter's state, by the parameter's name."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.Adam(model.parameters(), **({"lr": 0.01} | options))


@pytest.fixture
def saved(store: Path) -> tuple[Path, Two, Optimizer]:
    torch.manual_seed(0)
    model = Two()
    optimizer = adam(model)
    step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, store)
    let_go(store)
    return store, model, optimizer


# -- B87


def check_follow(saved: tuple[Path, Two, Optimizer], model: Two, optimizer: Optimizer) -> None:
    store, was, before = saved
    tierload.load(store, into={"model": model, "optimizer": optimizer})
    expected = states_by_name(was, before)
    assert_alike(states_by_name(model, optimizer), {name: expected[name] for name, _ in model.named_parameters()})
    assert step(model, optimizer, seed=1) == step(was, before, seed=1)


def test_b87_layers_in_another_order(saved: tuple[Path, Two, Optimizer]) -> None:
    model = Two("second", "first")
    check_follow(saved, model, adam(model))


def test_b87_groups_made_from_a_set(saved: tuple[Path, Two, Optimizer]) -> None:
    model = Two()
    check_follow(saved, model, torch.optim.Adam(list({*model.parameters()}), lr=0.01))


def test_b87_parameters_in_reverse(saved: tuple[Path, Two, Optimizer]) -> None:
    model = Two()
    check_follow(saved, model, torch.optim.Adam(list(model.parameters())[::-1], lr=0.01))


def test_b87_hyperparameters_go_with_their_parameters(store: Path) -> None:
    model = Two()

    def groups(model: Two, *names: str) -> list[dict[str, Any]]:
        return [{"params": list(getattr(model, name).parameters())} for name in names]

    optimizer = torch.optim.SGD(groups(model, "first", "second"), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1, 0.002
    step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, store)
    other = Two()
    swapped = torch.optim.SGD(groups(other, "second", "first"), lr=1.0, momentum=0.9)
    tierload.load(store, into={"model": other, "optimizer": swapped})
    assert [group["lr"] for group in swapped.param_groups] == [0.002, 0.1]
    assert_alike(states_by_name(other, swapped), states_by_name(model, optimizer))


def test_b87_by_position_only_is_refused(store: Path) -> None:
    """Saved without its module: nothing says which parameter is which."""
    model = Two()
    optimizer = adam(model)
    step(model, optimizer)
    for state in ({"optimizer": optimizer}, {"optimizer": optimizer.state_dict()}):
        tierload.save(state, store)
        fresh = adam(Two())
        with pytest.raises(KeyMismatch, match="name"):
            tierload.load(store, into={"optimizer": fresh})
        assert not fresh.state
    tierload.load(store, into={"optimizer": fresh}, strict=False)
    moments = [state["exp_avg"] for state in fresh.state.values()]
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True))


def test_b87_names_are_in_the_store(saved: tuple[Path, Two, Optimizer]) -> None:
    assert "optimizer/state/model~1first.weight/exp_avg" in stored_keys(saved[0])


# -- B89


class Partly(nn.Module):
    """One layer is frozen, one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.frozen(x))


@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize("live_stepped", [False, True])
def test_b89_exactly_the_saved_states(store: Path, stepped_before: bool, live_stepped: bool) -> None:
    model = Partly()
    optimizer = adam(model)
    if stepped_before:
        step(model, optimizer)
        assert set(states_by_name(model, optimizer)) == {"used.weight", "used.bias"}
    tierload.save({"model": model, "optimizer": optimizer}, store)
    let_go(store)
    other = Partly()
    live = adam(other)
    if live_stepped:
        other.requires_grad_(True)
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        live.step()
        live.zero_grad()
        other.frozen.requires_grad_(False)
        assert len(states_by_name(other, live)) == 5
    tierload.load(store, into={"model": other, "optimizer": live})
    assert_alike(states_by_name(other, live), states_by_name(model, optimizer))
    assert all(state for state in live.state.values()), "no empty state was made"
    assert step(other, live, seed=2) == step(model, optimizer, seed=2)


def test_b89_plain_loading_keeps_the_gaps(store: Path) -> None:
    model = Partly()
    optimizer = adam(model)
    step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, store)
    let_go(store)
    found = tierload.load(store)["optimizer"]
    assert found["state"].keys() == optimizer.state_dict()["state"].keys()
    fresh = adam(Partly())
    fresh.load_state_dict({key: found[key] for key in ("state", "param_groups")})
    assert len(fresh.state) == 2


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.LBFGS])
def test_b89_before_the_first_step(store: Path, make: Any) -> None:
    model = Two()
    optimizer = make(model.parameters(), lr=0.01)
    expected = copy.deepcopy(optimizer.state_dict())
    tierload.save({"model": model, "optimizer": optimizer}, store)
    let_go(store)
    other = Two()
    live = make(other.parameters(), lr=0.5)
    tierload.load(store, into={"model": other, "optimizer": live})
    assert_alike(live.state_dict(), expected)


def test_b87_a_history_over_all_parameters_needs_their_order(store: Path) -> None:
    """LBFGS has one state, under its first parameter: in another order its vectors would belong to other elements."""
    model = Two()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: sum(p.square().sum() for p in model.parameters()))
    tierload.save({"model": model, "optimizer": optimizer}, store)
    let_go(store)
    other = Two()
    turned = torch.optim.LBFGS(list(other.parameters())[::-1])
    with pytest.raises(tierload.KeyMismatch, match="optimizer: is a history over all parameters in their order"):
        tierload.load(store, into={"model": other, "optimizer": turned})
    tierload.load(store, into={"model": other, "optimizer": turned}, strict=False)
    assert not turned.state
    alike = torch.optim.LBFGS(other.parameters())
    tierload.load(store, into={"model": other, "optimizer": alike})
    assert_alike(alike.state_dict()["state"], optimizer.state_dict()["state"])


# -- B90


class EightBit(Optimizer):
    """What bitsandbytes keeps: uint8 moments, a scale a block of 256, and one table that all share."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["state1"] = torch.randint(0, 256, p.shape, dtype=torch.uint8)
                    state["absmax1"] = torch.rand(-(-p.numel() // 256))
                    state["qmap1"] = self.table
                    state["step"] = 0
                state["step"] += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b90_eight_bit_states(store: Path, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(70, 30), nn.Linear(30, 11)).to(dtype)
    optimizer = EightBit(model.parameters())
    optimizer.step()
    report = tierload.save({"model": model, "optimizer": optimizer}, store)
    numel = sum(p.numel() for p in model.parameters())
    blocks = sum(-(-p.numel() // 256) for p in model.parameters())
    assert report.raw_bytes == numel * dtype.itemsize + numel + 4 * blocks + 4 * 256, "the table is stored once"
    let_go(store)
    other = nn.Sequential(nn.Linear(70, 30), nn.Linear(30, 11)).to(dtype)
    for stepped in (False, True):
        live = EightBit(other.parameters())
        if stepped:
            live.step()
        tierload.load(store, into={"model": other, "optimizer": live})
        for (name, want), got in zip(states_by_name(model, optimizer).items(), live.state.values(), strict=True):
            assert got["state1"].dtype is torch.uint8, name
            assert got["absmax1"].dtype is torch.float32
            assert_alike(got, want)
        assert len({state["qmap1"].data_ptr() for state in live.state.values()}) == 1
    plain = tierload.load(store)["optimizer"]
    assert len({state["qmap1"].data_ptr() for state in plain["state"].values()}) == 1
    assert plain["state"][0]["state1"].dtype is torch.uint8
