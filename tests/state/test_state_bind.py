from __future__ import annotations

import collections
import copy
import dataclasses

import numpy as np
import pytest
import torch
from alike import assert_alike, assert_tensor
from fake_engine import bind, load, save
from models import Extra, Renaming, Rotary, TinyLM, train
from torch import nn

from tierload.errors import CorruptStore, KeyMismatch, UnsupportedValue
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
    plan = plan_bind(saved.document, saved.infos, into)
    assert plan.in_place == set(range(len(saved.infos)))
    assert {s.pointer for s in plan.destinations} == {t.data_ptr() for t in into["m"].state_dict().values()}
    assert plan.keys_of(0) == ("m/0.bias",)
    # Other strides in the target: through a buffer.
    into["m"].to(memory_format=torch.contiguous_format)
    plan = plan_bind(saved.document, saved.infos, into)
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
        plan_bind(saved.document, saved.infos, into)
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


def test_a_root_that_is_a_module():
    model, other = TinyLM(), TinyLM()
    report = bind(save(model), other)
    assert equal_modules(model, other)
    assert "embed.weight" in report.loaded
    assert bind(save(model.state_dict()), TinyLM()).loaded == report.loaded
    into = TinyLM().state_dict()
    bind(save(model), into)
    assert all(torch.equal(into[key], value) for key, value in model.state_dict().items())


def test_plain_loading_of_a_module_is_its_state_dict():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    loaded = load(save({"m": model}))["m"]
    assert type(loaded) is collections.OrderedDict
    assert loaded._metadata == model.state_dict()._metadata
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in loaded.values())
    fresh = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    fresh.load_state_dict(loaded)
    assert equal_modules(model, fresh)


@pytest.mark.parametrize("meta", [False, True])
def test_b45_ties_stay_and_training_goes_on_alike(meta):
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    saved = save({"model": model, "optimizer": optimizer})
    assert sum(key.startswith("model/") for key in saved.keys) == 5

    with torch.device("meta" if meta else "cpu"):
        other = TinyLM()
    shared = other.embed.weight
    theirs = torch.optim.AdamW(other.parameters(), lr=0.5)
    bind(saved, {"model": other, "optimizer": theirs})
    assert other.embed.weight is other.head.weight is shared
    assert not any(tensor.is_meta for tensor in other.state_dict().values())
    assert len(list(other.named_parameters())) == len(list(model.named_parameters()))
    assert other.embed.weight.requires_grad
    assert train(other, theirs, 5, seed=1) == train(model, optimizer, 5, seed=1)
    assert equal_modules(model, other)


def test_b45_plain_loading_keeps_ties():
    loaded = load(save({"model": TinyLM()}))["model"]
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()


def test_attributes_of_meta_parameters_survive():
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    layer.weight.shard_dim = 1
    layer.bias.requires_grad_(False)
    bind(save({"m": nn.Linear(2, 2)}), {"m": layer})
    assert layer.weight.shard_dim == 1
    assert type(layer.weight) is nn.Parameter
    assert not layer.bias.requires_grad


def test_separate_meta_tensors_do_not_become_tied():
    shared = torch.ones(2)
    with torch.device("meta"):
        module = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    bind(save({"m": collections.OrderedDict([("0", shared), ("1", shared)])}), {"m": module})
    assert module[0].data_ptr() != module[1].data_ptr()
    assert module[1].tolist() == [1, 1]


def test_b83_buffers_left_on_meta_are_an_error():
    with torch.device("meta"):
        model = Rotary()
    saved = save({"m": Rotary()})
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, {"m": model})
    assert caught.value.missing == ("m/inv_freq",)
    assert "not part of state_dict()" in str(caught.value)
    assert model.proj.weight.is_meta
    model.inv_freq = torch.arange(4.0)
    bind(saved, {"m": model})
    assert not model.proj.weight.is_meta
    with torch.device("meta"):
        model = Rotary()
    assert bind(saved, {"m": model}, strict=False).missing == ("m/inv_freq",)
    with torch.device("meta"):
        wider = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with pytest.raises(KeyMismatch) as caught:
        bind(save({"m": nn.ModuleDict({"a": nn.Linear(2, 2)})}), {"m": wider})
    assert caught.value.missing == ("m/b.bias", "m/b.weight")


def test_tensors_on_meta_in_a_dict_are_replaced():
    into = {"t": torch.empty(3, device="meta")}
    bind(save({"t": torch.ones(3)}), into)
    assert into["t"].tolist() == [1, 1, 1]
    with pytest.raises(KeyMismatch, match="immutable"):
        bind(save({"t": (torch.ones(3),)}), {"t": (torch.empty(3, device="meta"),)})


def test_extra_state():
    model = Extra()
    model.count = 5
    other = Extra()
    bind(save({"m": model}), {"m": other})
    assert other.count == 5
    assert other.history.tolist() == [5, 5]
    assert torch.equal(other.weight, model.weight)


def test_hooks_are_respected():
    model = Renaming()
    bind(save({"m": Renaming()}), {"m": model})
    assert model.calls == 1
    old = collections.OrderedDict(old=torch.full((3,), 2.0))
    bind(save({"m": old}), {"m": model})
    assert model.weight.tolist() == [2, 2, 2]
    wrong = collections.OrderedDict(other=torch.full((3,), 3.0))
    with pytest.raises(KeyMismatch, match="load_state_dict refused"):
        bind(save({"m": wrong}), {"m": model})
    with torch.device("meta"):
        meta = Renaming()
    bind(save({"m": model}), {"m": meta})
    assert meta.weight.tolist() == [2, 2, 2]


def test_modules_with_their_own_loading():
    class Custom(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.seen = sorted(state_dict)
            super()._load_from_state_dict(state_dict, prefix, *args)

    model, other = Custom(2, 2), Custom(2, 2)
    bind(save({"m": model}), {"m": other})
    assert other.seen == ["bias", "weight"]
    assert equal_modules(model, other)
    with pytest.raises(KeyMismatch) as caught:
        bind(save({"m": nn.Linear(2, 3)}), {"m": other})
    assert caught.value.shapes == ("m/bias", "m/weight")


def test_tied_in_the_store_and_apart_in_the_target():
    shared = torch.randn(2, 3)
    into = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 2), "c": torch.zeros(3)}
    bind(save({"a": shared, "b": shared.t(), "c": shared[1]}), into)
    assert torch.equal(into["a"], shared)
    assert torch.equal(into["b"], shared.t())
    assert torch.equal(into["c"], shared[1])


def test_tied_in_both():
    shared, live = torch.randn(4), torch.zeros(4)
    into = {"a": live, "b": live[1:3], "c": live.view(2, 2)}
    saved = save({"a": shared, "b": shared[1:3], "c": shared.view(2, 2)})
    plan = plan_bind(saved.document, saved.infos, into)
    assert plan.in_place == {0}
    bind(saved, into)
    assert torch.equal(live, shared)


def test_apart_in_the_store_and_tied_in_the_target():
    saved = save({"a": torch.ones(3), "b": torch.zeros(3)})
    live = torch.full((3,), 5.0)
    with pytest.raises(KeyMismatch, match="shares memory"):
        bind(saved, {"a": live, "b": live})
    with pytest.raises(KeyMismatch, match="shares memory"):
        bind(saved, {"a": live, "b": live.view(3)})
    assert live.tolist() == [5, 5, 5]
    report = bind(saved, {"a": live, "b": live}, strict=False)
    assert live.tolist() == [1, 1, 1]
    assert report.loaded == ("a",)
    assert report.unexpected == ("b",)
    with torch.device("meta"):
        model = nn.ParameterList([nn.Parameter(torch.ones(3))])
        model.append(model[0])
    with pytest.raises(KeyMismatch, match="shares memory"):
        bind(save({"m": collections.OrderedDict([("0", torch.ones(3)), ("1", torch.zeros(3))])}), {"m": model})


def test_ties_of_another_kind_are_refused():
    shared, live = torch.randn(3, 3), torch.zeros(3, 3)
    saved = save({"a": shared, "b": shared.t(), "c": shared[1]})
    for into in (
        {"a": live, "b": live, "c": torch.zeros(3)},
        {"a": live, "b": torch.zeros(3, 3), "c": live[2]},
        {"a": live, "b": torch.zeros(3, 3), "c": live[:, 1]},
    ):
        with pytest.raises(KeyMismatch, match="shares memory"):
            bind(saved, into)
        assert not live.any()
    bind(saved, {"a": live, "b": live.t(), "c": live[1]})
    assert torch.equal(live, shared)
    # The same tie in another memory format.
    square = torch.randn(2, 3, 4, 4)
    live = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    bind(save({"a": square, "b": square}), {"a": live, "b": live})
    assert torch.equal(live, square)


def test_parts_of_a_large_buffer_that_are_stored_apart():
    x, y = torch.arange(10_000.0), torch.zeros(10_000)
    state = {"a": x[:10], "c": x[::1000], "e": x[:1].expand(9)}
    saved = save(state)
    assert len(saved.keys) == 2
    live = {"a": y[:10], "c": y[::1000], "e": y[:1].expand(9)}
    bind(saved, live)
    assert all(torch.equal(live[key], value) for key, value in state.items())
    with pytest.raises(KeyMismatch, match="shares memory"):
        bind(save({"a": x[:10].clone(), "c": x[::1000].clone(), "e": state["e"].clone()}), live)


def test_the_graph_is_not_kept_alive():
    from tierload.state import flatten

    weight = torch.ones(3, requires_grad=True)
    flat = flatten({"t": weight * 2})
    assert flat.chunks[0].owner.grad_fn is None


def test_columns_of_one_matrix_are_not_a_clash():
    live = torch.zeros(3, 2)
    bind(save({"a": torch.ones(3), "b": torch.full((3,), 2.0)}), {"a": live[:, 0], "b": live[:, 1]})
    assert live.tolist() == [[1, 2]] * 3


def test_the_same_object_twice():
    model = nn.Linear(2, 2)
    saved = save({"a": model, "b": model})
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    bind(saved, {"a": one, "b": two})
    assert equal_modules(model, one)
    assert equal_modules(model, two)
    bind(saved, {"a": one, "b": one})
    ring: dict = {"t": torch.ones(1)}
    ring["self"] = ring
    live: dict = {"t": torch.zeros(1)}
    live["self"] = live
    bind(save(ring), live)
    assert live["t"].item() == 1


class Scheduler:
    def __init__(self) -> None:
        self.state: dict = {"n": 0}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def test_objects_with_a_state_dict():
    saved = Scheduler()
    saved.state = {"n": 3, "t": torch.ones(2), "blob": bytes(5000)}
    live = Scheduler()
    bind(save({"s": saved}), {"s": live})
    assert_alike(live.state, saved.state)
    bind(save({"s": saved.state}), {"s": live})
    with pytest.raises(KeyMismatch, match="Scheduler"):
        bind(save({"s": 3}), {"s": live})


def test_real_schedulers_and_scaler():
    layer = nn.Linear(2, 2)

    def make():
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        ]
        return {"s": schedulers, "g": torch.amp.GradScaler("cpu"), "o": optimizer, "m": layer}

    state, live = make(), make()
    for _ in range(3):
        state["o"].step()
        for scheduler in state["s"]:
            scheduler.step(*([0.5] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    bind(save(state), live)
    for ours, theirs in zip(state["s"], live["s"], strict=True):
        assert ours.state_dict() == theirs.state_dict()
    assert live["o"].param_groups[0]["lr"] == state["o"].param_groups[0]["lr"]


def test_targets_that_cannot_be_filled():
    with pytest.raises(UnsupportedValue, match="sparse"):
        bind(save({"t": torch.eye(2)}), {"t": torch.eye(2).to_sparse()})
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(KeyMismatch, match="cannot be written"):
        bind(save({"a": np.ones(2)}), {"a": frozen})


def test_hostile_documents_change_nothing():
    live = torch.zeros(2)
    saved = save({"t": torch.ones(2)})
    for text in (b'{"d":{"t":{"rng":5}}}', b'{"d":{"t":{"object":[]}}}', b'{"d":{"t":{"what":1}}}', b'{"d":[]}'):
        with pytest.raises(CorruptStore):
            plan_bind(b'{"version":1,"root":' + text + b"}", saved.infos, {"t": live})


def test_inference_tensors_and_no_grad():
    with torch.inference_mode():
        live = torch.zeros(3)
    bind(save({"t": torch.ones(3)}), {"t": live})
    assert live.tolist() == [1, 1, 1]
    assert_tensor(load(save({"t": live}))["t"], torch.ones(3))
