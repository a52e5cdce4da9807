from __future__ import annotations

import collections
import copy
import dataclasses

import numpy as np
import pytest
import torch
from alike import assert_alike
from fake_engine import bind, save
from torch import nn

from tierload.errors import KeyMismatch
from tierload.state import plan_bind
from tierload.types import LoadReport


def equal_modules(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def snapshot(target) -> object:
    return copy.deepcopy({key: v.state_dict() if isinstance(v, nn.Module) else v for key, v in target.items()})


def test_tensors_and_values_are_filled_in_place():
    state = {"t": torch.randn(3, 4), "list": [torch.randn(2), 5], "step": 7, "name": "a", 1: torch.ones(2), "none": 3.5}
    saved = save(state)
    into = {"t": torch.zeros(3, 4), "list": [torch.zeros(2), 0], "step": 0, "name": "", 1: torch.zeros(2), "none": None}
    tensors = [into["t"], into["list"], into["list"][0], into[1]]
    report = bind(saved, into)
    assert_alike(into, state)
    assert all(a is b for a, b in zip(tensors, [into["t"], into["list"], into["list"][0], into[1]], strict=True))
    assert isinstance(report, LoadReport)
    assert report.loaded == ("#1", "list/#0", "list/#1", "name", "none", "step", "t")


def test_destinations_are_the_target_itself():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    saved = save({"m": model})
    into = {"m": copy.deepcopy(model)}
    plan = plan_bind(saved.document, saved.chunks, into)
    assert plan.in_place == set(range(len(saved.infos)))
    assert set(plan.destinations.pointers.tolist()) == {t.data_ptr() for t in into["m"].state_dict().values()}
    assert plan.keys_of(0) == ("m/0.bias",)
    # Other strides in the target: through a buffer.
    into["m"].to(memory_format=torch.contiguous_format)
    plan = plan_bind(saved.document, saved.chunks, into)
    assert len(plan.in_place) == len(saved.infos) - 1
    report = bind(saved, into)
    assert equal_modules(into["m"], model)
    assert into["m"][0].weight.is_contiguous()
    assert len(report.loaded) == len(saved.infos)


def test_autograd_sees_the_change():
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    bind(save({"w": torch.zeros(2)}), {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "make", [lambda t: t[:, ::2], lambda t: t.t(), lambda t: t.conj(), lambda t: t[:1].expand(5, 6)]
)
def test_odd_targets(make):
    live = make(torch.zeros(4, 6, dtype=torch.complex64))
    value = torch.randn(live.shape, dtype=torch.complex64)
    if 0 in live.stride():
        with pytest.raises(KeyMismatch, match="expand"):
            bind(save({"t": value}), {"t": live})
        value = torch.randn(1, 6, dtype=torch.complex64).expand(5, 6)
    bind(save({"t": value}), {"t": live})
    assert torch.equal(live, value)
    assert live.is_conj() == make(torch.zeros(4, 6, dtype=torch.complex64)).is_conj()


def test_b81_every_difference_is_told_and_nothing_is_changed():
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("a", "b", "c", "d")})
    state = {"model": model, "step": 3, "gone": torch.ones(1), "t": torch.ones(1, 3), "d": torch.ones(2)}
    saved = save(state)
    live = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("a", "b", "x")})
    live["c"] = nn.Linear(3, 4)
    into = {
        "model": live,
        "step": 0,
        "new": torch.zeros(1),
        "t": torch.zeros(3, 3),
        "d": torch.zeros(2, dtype=torch.half),
    }
    before = snapshot(into)
    with pytest.raises(KeyMismatch) as caught:
        plan_bind(saved.document, saved.chunks, into)
    error = caught.value
    assert error.missing == ("model/x.bias", "model/x.weight", "new")
    assert error.unexpected == ("gone", "model/d.bias", "model/d.weight")
    assert error.shapes == ("model/c.bias", "model/c.weight", "t")
    assert error.dtypes == ("d",)
    for key in (*error.missing, *error.unexpected, *error.shapes, *error.dtypes):
        assert key in str(error)
    assert "(1, 3)" in str(error)
    assert "cast=True" in str(error)
    assert_alike(snapshot(into), before)

    report = bind(saved, into, strict=False)
    assert report.missing == error.missing
    assert report.unexpected == error.unexpected
    assert report.shapes == error.shapes
    assert report.dtypes == error.dtypes
    assert report.loaded == ("model/a.bias", "model/a.weight", "model/b.bias", "model/b.weight", "step")
    assert into["step"] == 3
    assert equal_modules(live["a"], model["a"])
    assert torch.equal(into["t"], torch.zeros(3, 3)), "nothing is broadcast"


@pytest.mark.parametrize("shapes", [((1, 4), (4,)), ((4,), (1, 4)), ((1, 4), (4, 4)), ((4, 1), (1, 4)), ((0,), (0, 1))])
def test_b81_nothing_is_broadcast(shapes):
    with pytest.raises(KeyMismatch) as caught:
        bind(save({"t": torch.ones(shapes[0])}), {"t": torch.zeros(shapes[1])})
    assert caught.value.shapes == ("t",)


def test_cast_is_between_floats_only():
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for source in [*kinds, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]:
        for target in [*kinds, torch.int64, torch.complex128, torch.uint8, torch.float8_e5m2]:
            live = torch.zeros(3, dtype=target)
            saved = save({"t": torch.tensor([0.0, 1.0, 0.0]).to(source)})
            if source in kinds and target in kinds:
                if source is not target:
                    with pytest.raises(KeyMismatch, match="cast=True"):
                        bind(saved, {"t": live})
                report = bind(saved, {"t": live}, cast=True)
                assert report.cast == (() if source is target else ("t",))
                assert live.tolist() == [0, 1, 0]
            elif source is not target:
                with pytest.raises(KeyMismatch) as caught:
                    bind(saved, {"t": live}, cast=True)
                assert caught.value.dtypes == ("t",)
                assert not live.to(torch.complex64).any()


def test_kinds_that_differ():
    saved = save({"a": torch.ones(1), "b": 1, "c": {"x": 1}, "d": [torch.ones(1)]})
    into = {"a": nn.Linear(1, 1), "b": torch.ones(1), "c": [torch.ones(1)], "d": {"x": torch.ones(1)}}
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, into)
    assert caught.value.dtypes == ("a", "b", "c", "d")
    with pytest.raises(TypeError, match="into is a int"):
        bind(saved, 5)


def test_keys_restrict_both_sides():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = save({"model": model, "optimizer": {"x": torch.ones(1)}, "step": 4})
    into = {"model": other, "extra": torch.ones(3), "step": 0}
    report = bind(saved, into, keys=["model"])
    assert report.loaded == ("model/bias", "model/weight")
    assert equal_modules(model, other)
    assert into["step"] == 0
    bind(saved, into, keys=["model/bias", "step"])
    assert into["step"] == 4
    with pytest.raises(KeyMismatch, match="nothing/"):
        bind(saved, into, keys=["nothing/*", "model"])
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, into, keys=["model", "extra", "step"])
    assert caught.value.missing == ("extra",)


def test_placeholders_take_what_is_stored():
    state = {"history": [1, {"a": torch.ones(2)}], "meta": {"x": 1, "y": bytes(5000)}, "best": 0.5}
    into = {"history": [], "meta": {}, "best": None}
    holders = (into["history"], into["meta"])
    bind(save(state), into)
    assert_alike(into, state)
    assert (into["history"], into["meta"]) == holders
    assert into["history"] is holders[0]
    assert into["meta"] is holders[1]


def test_plain_lists_are_replaced_whole():
    into = {"losses": [9.0], "pair": (1, 2), "set": {1}}
    losses = into["losses"]
    bind(save({"losses": [1.0, 2.0, 3.0], "pair": (3, 4), "set": {2, 3}}), into)
    assert into == {"losses": [1.0, 2.0, 3.0], "pair": (3, 4), "set": {2, 3}}
    assert into["losses"] is losses


def test_tuples_are_filled_and_their_values_left():
    saved = save({"pair": (torch.ones(2), 7)})
    into = {"pair": (torch.zeros(2), 0)}
    report = bind(saved, into)
    assert into["pair"][0].tolist() == [1, 1]
    assert into["pair"][1] == 0
    assert any("immutable" in note for note in report.notes)
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, {"pair": (torch.zeros(2), 0, torch.ones(1))})
    assert caught.value.missing == ("pair/#2",)


def test_dataclasses_and_deques_of_plain_values_are_filled_in_place():
    @dataclasses.dataclass
    class Progress:
        best: float = 0.0
        seen: list[int] = dataclasses.field(default_factory=list)

    frozen = dataclasses.make_dataclass("Frozen", ["x"], frozen=True)
    saved = save({"p": Progress(0.5, [1]), "q": collections.deque([3, 1, 2]), "f": frozen(1)})
    progress, recent = Progress(), collections.deque([0], maxlen=2)
    into = {"p": progress, "q": recent, "f": frozen(0)}
    bind(saved, into)
    assert into == {"p": Progress(0.5, [1]), "q": collections.deque([1, 2]), "f": {"x": 1}}
    assert into["p"] is progress
    assert into["q"] is recent
    with pytest.raises(KeyMismatch) as caught:
        bind(save({"p": {"best": 1.0}}), {"p": progress})
    assert caught.value.missing == ("p/seen/#0",)
    assert progress.best == 0.5


@dataclasses.dataclass
class Holder:
    weight: torch.Tensor
    step: int


def test_dataclasses_and_arrays():
    saved = save({"h": Holder(torch.ones(2), 5), "a": np.arange(4.0), "q": collections.deque([torch.ones(1), 3])})
    into = {"h": Holder(torch.zeros(2), 0), "a": np.zeros(4), "q": collections.deque([torch.zeros(1), 0])}
    array = into["a"]
    bind(saved, into)
    assert into["h"].step == 5
    assert into["h"].weight.tolist() == [1, 1]
    assert into["a"] is array
    assert array.tolist() == [0, 1, 2, 3]
    assert into["q"][1] == 3
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, into | {"a": np.zeros(5)})
    assert caught.value.shapes == ("a",)
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, into | {"a": np.zeros(4, np.float32)})
    assert caught.value.dtypes == ("a",)
