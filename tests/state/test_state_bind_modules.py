from __future__ import annotations

import collections
import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from alike import assert_alike, assert_tensor
from fake_engine import bind, load, save
from models import Extra, Renaming, Rotary, TinyLM, train
from torch import nn

from tierload.errors import CorruptStore, KeyMismatch, UnsupportedValue
from tierload.state import plan_bind


def equal_modules(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def snapshot(target) -> object:
    return copy.deepcopy({key: v.state_dict() if isinstance(v, nn.Module) else v for key, v in target.items()})


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
    plan = plan_bind(saved.document, saved.chunks, into)
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


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        ctx.held = Extra()
        return tensor * 2


def test_the_graph_is_not_kept_alive():
    from tierload.state import flatten

    weight = torch.ones(3, requires_grad=True)
    product = Doubled.apply(weight)
    held = weakref.ref(product.grad_fn.held)
    flat = flatten({"t": product})
    del product
    gc.collect()
    assert held() is None
    assert flat.chunks.key(0) == "t"


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
    with pytest.raises(UnsupportedValue, match="subclass"):
        bind(save({"t": torch.eye(2)}), {"t": torch.eye(2).as_subclass(type("Odd", (torch.Tensor,), {}))})
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(KeyMismatch, match="cannot be written"):
        bind(save({"a": np.ones(2)}), {"a": frozen})


def test_hostile_documents_change_nothing():
    live = torch.zeros(2)
    saved = save({"t": torch.ones(2)})
    for text in (b'{"d":{"t":{"rng":5}}}', b'{"d":{"t":{"object":[]}}}', b'{"d":{"t":{"what":1}}}', b'{"d":[]}'):
        with pytest.raises(CorruptStore):
            plan_bind(b'{"version":1,"root":' + text + b"}", saved.chunks, {"t": live})


def test_inference_tensors_and_no_grad():
    with torch.inference_mode():
        live = torch.zeros(3)
    bind(save({"t": torch.ones(3)}), {"t": live})
    assert live.tolist() == [1, 1, 1]
    assert_tensor(load(save({"t": live}))["t"], torch.ones(3))


def test_lazy_modules_take_the_shapes_that_are_stored():
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    saved, live = lazy().eval(), lazy().eval()
    saved(torch.ones(2, 4))
    bind(save({"m": saved}), {"m": live})
    assert equal_modules(saved, live)
    assert torch.equal(live(torch.ones(1, 4)), saved(torch.ones(1, 4)))
