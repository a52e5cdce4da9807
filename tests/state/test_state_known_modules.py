"""Modules and optimizers whose state is known without calling them: it is what calling them gives, byte for byte."""

from __future__ import annotations

import collections
import copy
import itertools
from abc import ABC

import pytest
import torch
from alike import assert_alike
from fake_engine import load, save
from models import Extra, Renaming, Rotary, TinyLM
from test_state_walk import both
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from two_ways import facts_of, python_way

from tierload import _native
from tierload.state import modules
from tierload.state.flatten import flatten
from tierload.state.keys import ROOT, Path
from tierload.state.names import ParameterNames
from tierload.state.wrappers import bare_module


def known(module: object) -> bool:
    """Whether the state of a module is known without calling it."""
    return modules.known_state(module, ROOT) is not None


def check(module: nn.Module, ordinary: bool | None = True) -> None:
    """What is stored of a module and an optimizer of its parameters is what state_dict() of both gives."""
    if ordinary is not None:
        assert known(module) == ordinary
    state: dict[str, object] = {"a/b": {"model": module}, "again": module}
    stored = both(state)
    parameters = [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]
    if not parameters or not isinstance(stored, dict):
        return
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.layout is torch.strided and not parameter.is_meta:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert isinstance(both({"o": optimizer, **state}), dict)
    assert isinstance(both({**state, "o": [optimizer], "epoch": 3}), dict)
    assert_alike(dict(load(save({"m": module}))["m"]), dict(bare_module(module).state_dict()))


class Nested(nn.Module):
    """Everything that an ordinary module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.none = None
        self.register_parameter("no_parameter", None)
        self.register_buffer("no_buffer", None)
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_module("nothing", None)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.bfloat = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.complex = nn.Parameter(torch.view_as_complex(torch.arange(8.0).view(4, 2)))
        self.register_buffer("conj", self.complex.detach().conj())
        self.register_buffer("neg", torch._neg_view(torch.arange(4.0)))
        self.register_buffer("wants", torch.ones(2, requires_grad=True))
        self.register_buffer("graph", torch.ones(2, requires_grad=True) * 2)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("part", self.mean[1:])
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2)])
        self.shared = self.layers[0]
        self.named = nn.ModuleDict({"a": nn.Identity(), "b~/#": nn.Linear(1, 1), "#": nn.Linear(1, 1)})
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(1)), self.frozen])
        self.by_name = nn.ParameterDict({"x/y": nn.Parameter(torch.ones(1))})


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module[1].bias = nn.Parameter(module[0].bias.detach())
    return module


class Abstract(nn.Module, ABC):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Forwarding(nn.Module):
    """A wrapper that passes on what it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


class Versioned(nn.Linear):
    _version = 7


def of_instance(module: nn.Module, **attributes) -> nn.Module:
    module.__dict__.update(attributes)
    return module


def in_half(module: nn.Module) -> nn.Module:
    return module.to(torch.float16)


ORDINARY = {
    "linear": lambda: nn.Linear(2, 3),
    "nothing": lambda: nn.Identity(),
    "nested": Nested,
    "tied": tied,
    "tied model": TinyLM,
    "no persistent buffers": Rotary,
    "batch norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2)),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 4),
    "abstract": Abstract,
    "own __getattr__": Forwarding,
    "version of the class": lambda: Versioned(2, 2),
    "version of the instance": lambda: of_instance(nn.Linear(2, 2), _version=3),
    "no version": lambda: of_instance(nn.Linear(2, 2), _version=None),
    "half": lambda: in_half(nn.Linear(2, 2)),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
    "new spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "compiled": lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
    "data parallel": lambda: nn.DataParallel(nn.Linear(2, 2)),
    "copied": lambda: copy.deepcopy(tied()),
    "on meta": lambda: nn.Linear(2, 2, device="meta"),
    "materialized": lambda: materialized(nn.LazyLinear(2)),
    "deep": lambda: deep(100),
    "loading hooks": Renaming,
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
}


def materialized(module: nn.Module) -> nn.Module:
    module(torch.ones(1, 3))
    return module


def deep(levels: int) -> nn.Module:
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(levels):
        module = nn.Sequential(module)
    return module


@pytest.mark.parametrize("make", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_modules(make):
    check(make())


# ---- Modules that say themselves what their state is ----------------------------------------------------------------
class OwnStateDict(nn.Linear):
    def state_dict(self, *args, **options):
        return super().state_dict(*args, **options) | {"more": torch.ones(1)}


class OwnSave(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "double"] = self.weight.detach() * 2


class OwnNames(nn.Linear):
    def named_parameters(self, *args, **options):
        return (("x_" + name, one) for name, one in super().named_parameters(*args, **options))


class OwnModules(nn.Sequential):
    def named_modules(self, *args, **options):
        return iter([("", self)])


class Property(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    @property
    def _buffers(self):
        return {"b": torch.ones(3)}

    @_buffers.setter
    def _buffers(self, value):
        pass


class Attribute(nn.Linear):
    def __getattribute__(self, name):
        return 9 if name == "_version" else super().__getattribute__(name)


class Marked(torch.Tensor):
    """A subclass that detach() takes along."""


def hooked(register: str, hook) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    getattr(module[0], register)(hook)
    return module


def with_attribute(name: str, value: object) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return of_instance(module[1], **{name: value}) and module


def same_names() -> nn.Module:
    module = nn.Linear(2, 2)
    module._buffers["weight"] = torch.ones(5)
    return module


def dotted() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module._parameters["0.weight"] = nn.Parameter(torch.ones(1))
    return module


def unnamed() -> nn.Module:
    module = nn.Sequential()
    module._modules[""] = nn.Linear(1, 1)
    return module


def lambda_state(module: nn.Module) -> nn.Module:
    return of_instance(module, state_dict=lambda *args, **options: {"own": 1})


def not_interned() -> nn.Module:
    module = nn.Linear(2, 2)
    module.__dict__["".join(["state", "_", "dict"])] = lambda *args, **options: {"own": 1}
    return module


OTHERS = {
    "state_dict of a class": lambda: nn.Sequential(OwnStateDict(2, 2)),
    "_save_to_state_dict of a class": lambda: nn.Sequential(OwnSave(2, 2)),
    "extra state": lambda: nn.Sequential(Extra()),
    "names of a class": lambda: OwnNames(2, 2),
    "modules of a class": lambda: OwnModules(nn.Linear(2, 2)),
    "a property": Property,
    "__getattribute__": lambda: nn.Sequential(Attribute(2, 2)),
    "state_dict of an instance": lambda: nn.Sequential(lambda_state(nn.Linear(2, 2))),
    "a name that is not interned": not_interned,
    "hook": lambda: hooked(
        "register_state_dict_post_hook", lambda module, state, prefix, _: state.update({prefix + "x": torch.ones(1)})
    ),
    "old hook": lambda: hooked(
        "_register_state_dict_hook", lambda module, state, prefix, _: state.pop(prefix + "bias")
    ),
    "hook before": lambda: hooked(
        "register_state_dict_pre_hook", lambda module, prefix, keep: module.weight.data.fill_(3)
    ),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "lazy": lambda: nn.LazyLinear(2),
    "script": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
    "trace": lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
    "quantized": lambda: torch.ao.nn.quantized.Linear(2, 2),
    "version": lambda: with_attribute("_version", 1.5),
    "large version": lambda: with_attribute("_version", 2**80),
    "subclass of a parameter": lambda: with_attribute(
        "_parameters", {"weight": nn.Parameter(torch.ones(2).as_subclass(Marked))}
    ),
    "subclass of a buffer": lambda: with_attribute("_buffers", {"mean": torch.ones(2).as_subclass(Marked)}),
    "ordered parameters": lambda: with_attribute("_parameters", collections.OrderedDict(b=torch.ones(2))),
    "no tensor": lambda: with_attribute("_buffers", {"mean": 5}),
    "name in two dicts": same_names,
    "name of dots": dotted,
    "no name": unnamed,
    "name beyond ascii": lambda: nn.ModuleDict({"größe": nn.Linear(1, 1)}),
    "quote in a name": lambda: nn.ModuleDict({'"': nn.Linear(1, 1)}),
    "number as a name": lambda: with_attribute("_buffers", {1: torch.ones(1)}),
    "very deep": lambda: deep(210),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_modules_are_asked(make):
    try:
        module = make()
    except (RuntimeError, NotImplementedError) as error:  # torch without that kernel
        pytest.skip(str(error))
    assert not known(module)
    both({"m": module, "again": [module]})


def test_what_is_ordinary_is_asked_at_every_save():
    module, inner = nn.Sequential(nn.Linear(2, 2)), {"patched": torch.ones(1)}
    assert known(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "state_dict", lambda self, *args, **options: inner, raising=False)
        assert not known(module)
    assert known(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "state_dict", lambda self, *args, **options: inner)
        assert not known(module)
        assert list(load(save({"m": module}))["m"]) == ["patched"]
    assert known(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "_save_to_state_dict", lambda *args: None)
        assert not known(module)
    handle = module[0].register_state_dict_post_hook(lambda *args: None)
    assert not known(module)
    handle.remove()
    assert known(module)


def test_a_mode_that_changes_what_detach_gives():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result + 1 if function is torch.Tensor.detach else result

    with Mode():
        assert not known(nn.Linear(2, 2))


def test_a_module_that_is_inside_itself():
    module = nn.Sequential(nn.Linear(1, 1))
    module._modules["again"] = module
    assert not known(module)
    with pytest.raises(RecursionError):
        flatten({"m": module})


def test_modules_at_the_greatest_depth():
    for levels in range(485, 500):
        state: object = nn.Sequential(nn.Linear(1, 1))
        for _ in range(levels):
            state = [state]
        both(state)


def test_parameters_change_while_a_state_is_saved():
    """What an object does when it is asked for its state is seen by what comes after it, and not by what was before."""

    class Swaps:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def state_dict(self):
            self.module.weight = nn.Parameter(torch.ones(4, 4))
            return {}

        def load_state_dict(self, state) -> None:
            pass

    def facts() -> dict[str, object]:
        torch.manual_seed(0)
        module, other = nn.Linear(2, 2), nn.Linear(3, 3)
        optimizer = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.1)
        state = {
            "m": module,
            "n": other,
            "a": Swaps(module),
            "o": optimizer,
            "b": Swaps(other),
            "p": [optimizer, other],
        }
        return facts_of(flatten(state))

    native = facts()
    with python_way():
        assert facts() == native
    assert "1 of 4 parameters" in native["notes"][0]


def test_names_of_parameters():
    """By one walk natively, as by named_parameters()."""
    module = Nested()
    for state in ({"a": module, "b": [module.layers]}, module, {"x~/": {"#": tied()}}):
        native = ParameterNames(state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modules, "known_state", lambda module, path: None)
            python = ParameterNames(state)
        rows = native.keys.all()
        assert [(id(one), key) for one, key in rows] == [(id(one), key) for one, key in python.keys.all()]
        assert len(rows) > 3
        for one, _ in rows:
            assert native.of(one) == python.of(one)


# ---- Optimizers -----------------------------------------------------------------------------------------------------
def stepped(make, groups) -> torch.optim.Optimizer:
    optimizer = make(groups)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class More(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"more": 1}


def test_optimizers():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    one, two, three = ([*layer.parameters()] for layer in module)
    makers = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        "no state": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.5)),
        "lbfgs": None,
        "more": lambda p: More(p, lr=0.1),
    }
    for (name, make), groups in itertools.product(
        makers.items(),
        ([*one, *two], [{"params": two}, {"params": one, "lr": 0.2, "name": "x"}], [*one, torch.ones(2)]),
    ):
        if make is None:
            optimizer: torch.optim.Optimizer = torch.optim.LBFGS(module.parameters())
        else:
            optimizer = stepped(make, groups)
        for state in ({"m": module, "o": optimizer}, {"o": (optimizer, optimizer)}, {"o": optimizer, "n": module[1]}):
            assert isinstance(both(state), dict), name
        assert isinstance(both({"sd": module.state_dict(), "o": optimizer}), dict), name
    named = torch.optim.AdamW(module.named_parameters())
    assert isinstance(both({"m": module, "o": named}), dict)
    assert isinstance(both({"o": named}), dict)
    named.state[three[0]] = {"x": [torch.ones(2)], "y": three[0], "z": {}, 3: None}
    named.state["global"] = 5
    assert isinstance(both({"m": module, "o": named}), dict)
    del named.state["global"]
    shared = {"both": torch.ones(2)}
    named.state |= {three[0]: shared, three[1]: shared, one[0]: 7, one[1]: object}
    both({"m": module, "o": named})
    del named.state[one[1]]
    assert isinstance(both({"m": module, "shared": shared, "o": named}), dict)
    named.register_state_dict_post_hook(lambda optimizer, packed: packed["param_groups"][0].update(hook=True))
    assert isinstance(both({"m": module, "o": named}), dict)


def test_optimizers_of_which_the_state_is_known():
    module = nn.Linear(2, 2)
    names = ParameterNames({"m": module})

    def known_optimizer(optimizer: torch.optim.Optimizer) -> bool:
        from tierload.state import optimizers

        return optimizers.known_state(optimizer, names) is not None

    assert known_optimizer(torch.optim.AdamW(module.parameters()))
    assert known_optimizer(torch.optim.SGD([{"params": [module.weight]}, {"params": [module.bias], "lr": 1.0}]))
    assert not known_optimizer(More(module.parameters()))
    assert not known_optimizer(torch.optim.SGD([torch.ones(1)]))
    hooked = torch.optim.SGD(module.parameters())
    handle = hooked.register_state_dict_pre_hook(lambda optimizer: None)
    assert not known_optimizer(hooked)
    handle.remove()
    assert known_optimizer(hooked)
    hooked.state_dict = dict
    assert not known_optimizer(hooked)


def test_a_torch_that_somebody_has_patched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "state_dict", lambda self: {})
        assert "state_dict" not in modules.own_functions(nn.Module, "state_dict")
    assert list(modules.own_functions(nn.Module, "state_dict")) == ["state_dict"]
    assert parametrize.is_parametrized(parametrizations.weight_norm(nn.Linear(2, 2)))
    assert isinstance(modules.known_state(nn.Linear(1, 1), Path(None, "", 0)), _native.ModuleState)
