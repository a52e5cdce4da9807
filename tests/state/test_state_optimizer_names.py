"""Optimizer states go by the names of parameters, whoever wrote these names down: the module, the optimizer, a wrapper,
or torch.distributed.checkpoint with its dicts by fully qualified name."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from alike import assert_alike
from fake_engine import bind, load, save
from models import TinyLM
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from wrapping import compiled

from tierload.errors import KeyMismatch


class Two(nn.Module):
    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(3, 3))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """After two steps, in which every parameter has another gradient."""
    for _ in range(2):
        number = 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                number += 1
                parameter.grad = torch.full_like(parameter, number)
        optimizer.step()
    return optimizer


def two_groups(model: nn.Module, *, swapped: bool = False) -> torch.optim.Optimizer:
    """Weights decay and biases do not; the groups may have been added in another order."""
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "weight_decay": 0.1, "lr": 0.5},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.25},
    ]
    if swapped:
        groups.reverse()
        for group in groups:
            random.Random(0).shuffle(group["params"])
    return torch.optim.AdamW(groups)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State and hyperparameters of every parameter, by its name without wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        (group,) = (group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
        hyper = {key: value for key, value in group.items() if not key.startswith("param")}
        clean = name.replace("module.", "").replace("_orig_mod.", "")
        found[clean] = (dict(sorted(optimizer.state.get(parameter, {}).items())), dict(sorted(hyper.items())))
    return dict(sorted(found.items()))


def fqn_dict(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_optimizer_state_dict(model, optimizer, options=options)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, compiled], ids=["bare", "wrapped", "compiled"])
def test_state_dicts_by_fully_qualified_name(flat, wrap):
    model = wrap(Two())
    optimizer = stepped(two_groups(model))
    saved = save({"model": model, "optimizer": fqn_dict(model, optimizer, flat=flat)})
    assert any("a.weight" in key and "exp_avg" in key for key in saved.keys)
    for into in (Two("ba"), nn.DataParallel(Two("ba"))):
        for live in (two_groups(into, swapped=True), stepped(two_groups(into, swapped=True))):
            report = bind(saved, {"model": into, "optimizer": live})
            assert (report.missing, report.unexpected, report.shapes, report.dtypes) == ((), (), (), ())
            assert_alike(by_name(into, live), by_name(model, optimizer))
    assert {key for key in saved.keys if "exp_avg" in key} <= set(report.loaded), "by the keys of the store"


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_state_dicts_by_name_are_strict(flat):
    model = Two()
    saved = save({"model": model, "optimizer": fqn_dict(model, stepped(two_groups(model)), flat=flat)})
    other = Two("ab")
    partly = torch.optim.AdamW([other.a.weight, other.a.bias, other.b.bias])
    with pytest.raises(KeyMismatch) as found:
        bind(saved, {"model": other, "optimizer": partly})
    assert found.value.unexpected == ("optimizer/param_groups/#0", "optimizer/state/b.weight")
    assert not partly.state
    more = torch.optim.AdamW([*other.parameters(), nn.Parameter(torch.ones(2))])
    with pytest.raises(KeyMismatch, match="is of a parameter that the stored optimizer does not have"):
        bind(saved, {"model": other, "optimizer": more})
    key = "optimizer/state.a.weight." if flat else "optimizer/state/a.weight/"
    only = torch.optim.AdamW(other.parameters())
    report = bind(saved, {"optimizer": only, "model": other}, keys=[f"{key}*"])
    assert {name for name in report.loaded if name.startswith(key)} == {k for k in saved.keys if k.startswith(key)}
    assert list(only.state) == [other.a.weight]
    assert only.param_groups[0]["lr"] == 0.001, "the groups were not asked for"


def test_flattened_states_of_any_form():
    """Dots in names and in states, and what no parameter has."""
    ones = torch.ones(3)
    stored = {
        "state.a.weight.inner.deep.x": ones,
        "state.a.weight.step": torch.tensor(3.0),
        "param_groups.a.weight.lr": 0.5,
        "param_groups.a.bias.lr": 0.5,
        "param_groups.b.weight.lr": 0.5,
        "param_groups.b.bias.lr": 0.5,
    }
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    target = {"model": model, "optimizer": optimizer}
    bind(save({"model": model, "optimizer": stored}), target)
    assert_alike(dict(optimizer.state), {model.a.weight: {"inner": {"deep": {"x": ones}}, "step": torch.tensor(3.0)}})
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(KeyMismatch, match="gone: is of a parameter that no stored group has"):
        bind(save({"model": model, "optimizer": stored | {"state.gone.step": 1.0}}), target)
    for more in ({"epoch": 3}, {"state.a.weight.inner": ones}, {"param_groups.": 1, "state.": 2}):
        with pytest.raises(KeyMismatch):
            bind(save({"model": model, "optimizer": stored | more}), target)


@pytest.mark.parametrize(
    "stored",
    [
        {"state": {}, "param_groups": [{"params": 5}]},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": 7},
        {"state": {}, "param_groups": [{"params": ["a.weight", "a.weight"]}]},
        {"state": {}, "param_groups": [{"params": ["a.weight", 3]}]},
        {"state": {"gone": {}}, "param_groups": [{"params": ["a.weight"]}]},
        {"state": 3, "param_groups": [{"params": ["a.weight"]}]},
        {},
    ],
)
def test_dicts_of_another_form_are_refused(stored):
    model = Two()
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KeyMismatch):
        bind(save({"model": model, "optimizer": stored}), {"model": model, "optimizer": optimizer})
    assert_alike(optimizer.state_dict(), before)


def test_one_name_in_two_modules_is_told_and_not_guessed():
    """By fully qualified name both are the same parameter; an optimizer of one of them is clear."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    stored = fqn_dict(first, stepped(torch.optim.AdamW(first.parameters())), flat=False)
    target = {"g": first, "d": second}
    saved = save({**target, "optimizer": stored})
    alone = torch.optim.AdamW(second.parameters())
    bind(saved, {**target, "optimizer": alone})
    assert torch.equal(alone.state[second.bias]["exp_avg"], stored["state"]["bias"]["exp_avg"])
    both = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    with pytest.raises(KeyMismatch, match="is of a parameter"):
        bind(saved, {**target, "optimizer": both})
    assert not both.state


def test_tied_weights_have_one_state_under_any_of_their_names():
    model = TinyLM()
    stored = fqn_dict(model, stepped(torch.optim.AdamW(model.parameters())), flat=False)
    other = nn.DataParallel(TinyLM())
    optimizer = torch.optim.AdamW(other.parameters())
    bind(save({"model": model, "optimizer": stored}), {"model": other, "optimizer": optimizer})
    (name,) = stored["state"].keys() & {"embed.weight", "head.weight"}
    assert torch.equal(optimizer.state[other.module.head.weight]["exp_avg"], stored["state"][name]["exp_avg"])


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_names_that_the_optimizer_was_given_in_a_wrapper(order):
    """Made from named_parameters() of the one, loaded into that of the other, without a module in between."""
    for mine, theirs in (
        (nn.DataParallel(Two()), Two(order)),
        (Two(), compiled(nn.DataParallel(Two(order)))),
        (compiled(Two()), nn.DataParallel(Two(order))),
    ):
        optimizer = stepped(torch.optim.AdamW(mine.named_parameters()))
        fresh = torch.optim.AdamW(theirs.named_parameters(), lr=5.0)
        saved = save({"optimizer": optimizer})
        report = bind(saved, {"optimizer": fresh})
        assert "4 names of the store are read without the elements of wrappers" in " ".join(report.notes)
        assert_alike(moments(theirs, fresh), moments(mine, optimizer))
        # The module in the target is enough: its names are those that the other optimizer was given.
        nameless = torch.optim.AdamW(theirs.parameters())
        bind(saved, {"model": theirs, "optimizer": nameless}, keys=["optimizer"])
        assert_alike(moments(theirs, nameless), moments(mine, optimizer))


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: state for name, (state, _) in by_name(model, optimizer).items()}


def test_b87_groups_in_another_order_through_wrappers():
    model = nn.DataParallel(Two())
    optimizer = stepped(two_groups(model))
    saved = save({"model": model, "optimizer": optimizer})
    assert "optimizer/state/model~1a.weight/exp_avg" in saved.keys
    other = compiled(Two("ba"))
    for live in (two_groups(other, swapped=True), stepped(two_groups(other, swapped=True))):
        bind(saved, {"model": other, "optimizer": live})
        assert_alike(by_name(other, live), by_name(model, optimizer))


def test_b89_gaps_through_wrappers():
    """A frozen layer and an unused parameter have no states, and none are left where the target had some."""
    model = nn.DataParallel(Two())
    model.module.a.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.module.b.weight.grad = torch.ones(3, 3)
    before = save({"model": model, "optimizer": optimizer})
    optimizer.step()
    for saved, count in ((before, 0), (save({"model": model, "optimizer": optimizer}), 1)):
        for make in (torch.optim.AdamW, lambda parameters: stepped(torch.optim.AdamW(parameters))):
            other = Two("ba")
            live = make(other.parameters())
            bind(saved, {"model": other, "optimizer": live})
            assert len(live.state) == count
    assert_alike(dict(live.state[other.b.weight]), dict(optimizer.state[model.module.b.weight]))


class EightBit(torch.optim.Optimizer):
    """uint8 moments, a scale for each 256 of them, and a table that all share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.table = torch.linspace(-1, 1, 256)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            count = parameter.numel()
            self.state[parameter] = {
                "state1": torch.randint(0, 256, parameter.shape, dtype=torch.uint8),
                "absmax1": torch.rand(-(-count // 256)),
                "qmap1": self.table,
            }


@pytest.mark.parametrize("form", ["optimizer", "nested", "flattened"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b90_eight_bit_states_by_name(form, dtype):
    def model(wrap) -> nn.Module:
        return wrap(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20)).to(dtype))

    mine = model(nn.DataParallel)
    optimizer = EightBit(mine.parameters())
    optimizer.step()
    stored = optimizer if form == "optimizer" else fqn_dict(mine, optimizer, flat=form == "flattened")
    saved = save({"model": mine, "optimizer": stored})
    assert len([info for info in saved.infos if info.key.endswith("qmap1")]) == 1, "stored once"
    theirs = model(lambda module: module)
    fresh, other = EightBit(list(theirs.parameters())[::-1]), EightBit(theirs.parameters())
    other.step()
    for live in (fresh, other):
        bind(saved, {"model": theirs, "optimizer": live})
        assert_alike(moments(theirs, live), moments(mine, optimizer))
        assert {state["state1"].dtype for state in live.state.values()} == {torch.uint8}
        assert len({state["qmap1"].data_ptr() for state in live.state.values()}) == 1


def test_a_store_of_before_wrappers_were_dropped():
    """Names as an earlier release wrote them, with the wrapper's element: an object of names with `module.`."""
    model = Two()
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    saved = save({"model": nn.DataParallel(model), "optimizer": optimizer})
    old = saved.document.replace(b'"a.', b'"module.a.').replace(b'"b.', b'"module.b.')
    old = old.replace(b"model/a.", b"model/module.a.").replace(b"model/b.", b"model/module.b.")
    assert old != saved.document
    saved.document = old
    other = Two("ba")
    live = torch.optim.AdamW(other.parameters())
    report = bind(saved, {"model": other, "optimizer": live})
    assert_alike(by_name(other, live), by_name(model, optimizer))
    assert len(report.notes) == 2
    assert_alike(load(saved)["model"]["module.a.bias"], model.a.bias.detach())
