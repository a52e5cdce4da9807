from __future__ import annotations

import copy

import pytest
import torch
from alike import assert_alike, raw
from fake_engine import bind, load, save
from models import TinyLM, train
from torch import nn

from tierload.errors import KeyMismatch
from tierload.state import plan_bind


def stepped(model: nn.Module, make=torch.optim.Adam, **options) -> torch.optim.Optimizer:
    optimizer = make(model.parameters(), **options)
    for _ in range(2):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()
    return optimizer


class Two(nn.Module):
    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(3, 3))


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, which: str = "exp_avg") -> dict[str, torch.Tensor]:
    return {name: optimizer.state[p][which] for name, p in model.named_parameters() if p in optimizer.state}


def test_b87_moments_follow_their_names():
    model = Two("ab")
    optimizer = stepped(model)
    saved = save({"model": model, "opt": optimizer})
    assert "opt/state/model~1a.weight/exp_avg" in saved.keys
    want = moments(model, optimizer)

    swapped = Two("ba")
    reordered = torch.optim.Adam(list(swapped.parameters())[::-1])
    bind(saved, {"model": swapped, "opt": reordered})
    for name, value in moments(swapped, reordered).items():
        assert torch.equal(value, want[name]), name
    assert not torch.equal(want["a.weight"], want["b.weight"])

    groups = [{"params": [swapped.b.weight, swapped.a.bias], "lr": 0.5}, {"params": [swapped.a.weight, swapped.b.bias]}]
    regrouped = torch.optim.Adam(groups)
    bind(saved, {"model": swapped, "opt": regrouped})
    for name, value in moments(swapped, regrouped).items():
        assert torch.equal(value, want[name]), name
    assert [group["lr"] for group in regrouped.param_groups] == [0.001, 0.001]


def test_b87_hyperparameters_follow_their_group():
    model = Two()
    first = torch.optim.SGD(
        [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters(), "lr": 0.2, "momentum": 0.9}],
        lr=1,
    )
    other = Two()
    second = torch.optim.SGD([{"params": other.b.parameters()}, {"params": other.a.parameters()}], lr=7)
    bind(save({"m": model, "o": first}), {"m": other, "o": second})
    assert [(group["lr"], group["momentum"]) for group in second.param_groups] == [(0.2, 0.9), (0.1, 0)]
    mixed = torch.optim.SGD(other.parameters(), lr=7)
    with pytest.raises(KeyMismatch, match="hyperparameters differ"):
        bind(save({"m": model, "o": first}), {"m": other, "o": mixed})
    assert mixed.param_groups[0]["lr"] == 7


def test_b87_position_only_is_refused():
    model, other = Two(), Two("ba")
    optimizer = stepped(model)
    theirs = torch.optim.Adam(other.parameters())
    into = {"opt": theirs}
    saved = save({"opt": optimizer})
    assert any("by position" in note for note in saved.notes)
    for document in (saved, save({"opt": optimizer.state_dict()}), save({"model": model, "opt": optimizer})):
        with pytest.raises(KeyMismatch, match="named_parameters"):
            bind(document, into, keys=["opt"])
        assert not theirs.state
    report = bind(saved, into, strict=False)
    assert any("position" in note for note in report.notes)
    assert torch.equal(theirs.state[other.b.weight]["exp_avg"], optimizer.state[model.a.weight]["exp_avg"])


def test_names_from_named_parameters():
    model, other = Two("ab"), Two("ba")
    optimizer = torch.optim.Adam(model.named_parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    saved = save({"opt": optimizer})
    assert not saved.notes
    assert "opt/state/a.weight/exp_avg" in saved.keys
    theirs = torch.optim.Adam(other.named_parameters())
    bind(saved, {"opt": theirs})
    for name, value in moments(other, theirs).items():
        assert torch.equal(value, moments(model, optimizer)[name])
    assert theirs.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]
    # Saved with the module, loaded without: the optimizer's own names still match.
    fresh = torch.optim.Adam(other.named_parameters())
    bind(save({"m": model, "opt": optimizer}), {"opt": fresh}, keys=["opt"])
    assert torch.equal(moments(other, fresh)["a.bias"], moments(model, optimizer)["a.bias"])


def test_names_by_memory_of_a_state_dict():
    model, other = Two("ab"), Two("ba")
    optimizer = stepped(model)
    saved = save({"model": model.state_dict(), "opt": optimizer})
    assert "opt/state/model~1a.weight/exp_avg" in saved.keys
    theirs = torch.optim.Adam(other.parameters())
    bind(saved, {"model": other, "opt": theirs})
    assert torch.equal(moments(other, theirs)["b.bias"], moments(model, optimizer)["b.bias"])


def test_parameters_that_stand_in_the_state_themselves():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    weight.grad = torch.ones(2)
    optimizer.step()
    saved = save({"o": optimizer, "w": weight})
    assert "o/state/w/momentum_buffer" in saved.keys


def test_two_parameters_of_one_name():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([("w", other), ("x", weight)], lr=1.0, momentum=0.9)
    weight.grad, other.grad = torch.ones(2), torch.ones(3)
    optimizer.step()
    saved = save({"o": optimizer, "w": weight})
    assert [key for key in saved.keys if "momentum" in key] == [
        "o/state/#1/momentum_buffer",
        "o/state/w/momentum_buffer",
    ]
    assert any("by position" in note for note in saved.notes)
    assert_alike(load(saved)["o"]["state"], optimizer.state_dict()["state"])


def test_plain_loading_gives_torchs_form():
    model = TinyLM()
    optimizer = torch.optim.AdamW([{"params": model.mix.parameters()}, {"params": [model.embed.weight], "lr": 0.5}])
    train(model, optimizer, 2)
    loaded = load(save({"m": model, "o": optimizer}))["o"]
    want = optimizer.state_dict()
    assert loaded.pop("names") == ["m/mix.weight", "m/mix.bias", "m/embed.weight"]
    assert_alike(loaded, want)
    other = copy.deepcopy(model)
    fresh = torch.optim.AdamW([{"params": other.mix.parameters()}, {"params": [other.embed.weight]}])
    fresh.load_state_dict(load(save({"m": model, "o": optimizer}))["o"])
    assert_alike(fresh.state_dict(), want)
    assert train(other, fresh, 3) == train(model, optimizer, 3)


def test_b89_the_exact_set_of_states():
    def frozen(model):
        model.a.requires_grad_(False)
        return model

    model = frozen(Two())
    optimizer = torch.optim.Adam(model.parameters())
    empty = save({"m": model, "o": optimizer})
    model.b.weight.grad = torch.ones(3, 3)
    optimizer.step()
    saved = save({"m": model, "o": optimizer})
    assert [key for key in saved.keys if key.endswith("exp_avg")] == ["o/state/m~1b.weight/exp_avg"]

    other = Two()
    live = stepped(other)
    bind(saved, {"m": other, "o": live})
    assert list(moments(other, live)) == ["b.weight"]
    assert torch.equal(live.state[other.b.weight]["exp_avg"], optimizer.state[model.b.weight]["exp_avg"])
    live = stepped(other)
    bind(empty, {"m": other, "o": live})
    assert not moments(other, live)
    fresh = torch.optim.Adam(other.parameters())
    bind(empty, {"m": other, "o": fresh})
    assert not fresh.state
    loaded = load(empty)["o"]
    assert loaded["state"] == {}
    fresh.load_state_dict(loaded)
    other.b.weight.grad = torch.ones(3, 3)
    live.step()


class EightBit(torch.optim.Optimizer):
    """Blocks of uint8, absmax of another shape, and one quantisation map for all parameters."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.qmap = torch.linspace(-1, 1, 256)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                source = torch.Generator().manual_seed(parameter.numel())
                self.state[parameter] = {
                    "state1": torch.randint(0, 256, (parameter.numel(),), dtype=torch.uint8, generator=source),
                    "absmax1": torch.rand(-(-parameter.numel() // 256), generator=source),
                    "qmap1": self.qmap,
                    "step": 4,
                }


def test_b90_eight_bit_states_are_bit_exact():
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 3)).to(torch.bfloat16)
    optimizer = EightBit(model.parameters())
    optimizer.step()
    saved = save({"m": model, "o": optimizer})
    assert [key for key in saved.keys if key.endswith("qmap1")] == ["o/state/m~10.bias/qmap1"], "stored once"
    for stepped_before in (False, True):
        other = copy.deepcopy(model)
        live = EightBit(other.parameters())
        if stepped_before:
            live.step()
            for state in live.state.values():
                state["state1"].zero_()
        bind(saved, {"m": other, "o": live})
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert live.state[theirs]["state1"].dtype is torch.uint8
            assert live.state[theirs]["absmax1"].dtype is torch.float32
            assert live.state[theirs]["step"] == 4
            for name in ("state1", "absmax1", "qmap1"):
                assert raw(live.state[theirs][name]) == raw(optimizer.state[ours][name])
        maps = {live.state[parameter]["qmap1"].data_ptr() for parameter in other.parameters()}
        assert len(maps) == 1
    loaded = load(saved)["o"]["state"]
    assert loaded[0]["qmap1"].data_ptr() == loaded[3]["qmap1"].data_ptr()


def test_low_precision_parameters_keep_full_precision_states():
    model = Two().to(torch.bfloat16)
    optimizer = stepped(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float() + 2**-20
    other = copy.deepcopy(model)
    live = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    bind(save({"m": model, "o": optimizer}), {"m": other, "o": live})
    assert live.state[other.a.weight]["momentum_buffer"].dtype is torch.float32
    assert raw(live.state[other.a.weight]["momentum_buffer"]) == raw(optimizer.state[model.a.weight]["momentum_buffer"])


def test_states_of_a_stepped_optimizer_are_filled_in_place():
    model, other = Two(), Two()
    optimizer, live = stepped(model), stepped(other)
    kept = live.state[other.a.weight]["exp_avg"]
    saved = save({"m": model, "o": optimizer})
    into = {"m": other, "o": live}
    assert len(plan_bind(saved.document, saved.chunks, into).in_place) == len(saved.infos)
    bind(saved, into)
    assert live.state[other.a.weight]["exp_avg"] is kept
    assert torch.equal(kept, optimizer.state[model.a.weight]["exp_avg"])


def test_parameters_that_only_one_side_has():
    model, other = Two("abc"), Two("abd")
    optimizer, live = stepped(model), stepped(other)
    saved = save({"m": model, "o": optimizer})
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, {"m": other, "o": live})
    assert "o/state/m~1c.weight" in caught.value.unexpected
    assert "o/state/m~1d.weight" in caught.value.missing
    assert_alike(live.state_dict(), before)
    own = live.state[other.d.weight]["exp_avg"].clone()
    report = bind(saved, {"m": other, "o": live}, strict=False)
    assert "o/state/m~1a.weight/exp_avg" in report.loaded
    assert torch.equal(live.state[other.a.weight]["exp_avg"], optimizer.state[model.a.weight]["exp_avg"])
    assert torch.equal(live.state[other.d.weight]["exp_avg"], own)


def test_hooks_and_overrides():
    calls = []

    class Custom(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            calls.append(sorted(state_dict))
            super().load_state_dict(state_dict)

    model, other = Two("ab"), Two("ba")
    optimizer = stepped(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    saved = save({"m": model, "o": optimizer})
    live = Custom(other.parameters(), lr=1.0, momentum=0.9)
    bind(saved, {"m": other, "o": live})
    assert calls == [["param_groups", "state"]]
    assert torch.equal(
        moments(other, live, "momentum_buffer")["a.bias"], moments(model, optimizer, "momentum_buffer")["a.bias"]
    )

    live = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.9)
    live.register_load_state_dict_pre_hook(lambda o, packed: calls.append(len(packed["state"])))
    live.register_load_state_dict_post_hook(lambda o: calls.append(o.param_groups[0]["lr"]))
    bind(saved, {"m": other, "o": live})
    assert calls[1:] == [4, 0.1]
    assert live.param_groups[0]["params"][0] is other.b.weight


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.01), "capturable": False, "foreach": False}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_torchs_optimizers_go_on_alike(make, options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters(), **options)
    data = torch.randn(6, 4)

    def run(net, opt, steps):
        losses = []
        for _ in range(steps):

            def closure():
                opt.zero_grad()
                loss = net(data).square().mean()
                loss.backward()
                return loss

            losses.append(opt.step(closure).item())
        return losses

    run(model, optimizer, 3)
    saved = save({"m": model, "o": optimizer})
    other = nn.Linear(4, 2)
    live = make(other.parameters(), **options)
    bind(saved, {"m": other, "o": live})
    third = nn.Linear(4, 2)
    third.load_state_dict(load(saved)["m"])
    plain = make(third.parameters(), **options)
    plain.load_state_dict(load(saved)["o"])
    want = run(model, optimizer, 4)
    assert run(other, live, 4) == want
    assert run(third, plain, 4) == want


def test_a_part_of_an_optimizer():
    model, other = Two(), Two()
    optimizer, live = stepped(model, lr=0.5), stepped(other)
    own = live.state[other.a.weight]["exp_avg"].clone()
    bind(save({"m": model, "o": optimizer}), {"m": other, "o": live}, keys=["o/state/m~1b.*"])
    assert torch.equal(live.state[other.b.weight]["exp_avg"], optimizer.state[model.b.weight]["exp_avg"])
    assert torch.equal(live.state[other.a.weight]["exp_avg"], own)
    assert live.param_groups[0]["lr"] == 0.001


def test_what_else_an_optimizer_gives():
    class More(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict() | {"ema": torch.full((3,), 2.0)}

        def load_state_dict(self, state):
            self.ema = state["ema"]
            super().load_state_dict(state)

    model = Two()
    saved = save({"m": model, "o": More(model.parameters(), lr=0.1)})
    assert "o/ema" in saved.keys
    assert load(saved)["o"]["ema"].tolist() == [2, 2, 2]
    live = More(model.parameters(), lr=0.5)
    bind(saved, {"m": model, "o": live})
    assert live.ema.tolist() == [2, 2, 2]
    assert live.param_groups[0]["lr"] == 0.1


def test_optimizers_with_a_form_of_their_own():
    class Odd(torch.optim.SGD):
        def state_dict(self):
            return {"mine": [1, 2]}

        def load_state_dict(self, state):
            self.mine = state["mine"]

    model = Two()
    saved = save({"m": model, "o": Odd(model.parameters(), lr=0.1)})
    assert any("form of its own" in note for note in saved.notes)
    assert load(saved)["o"] == {"mine": [1, 2]}
    live = Odd(model.parameters(), lr=0.1)
    bind(saved, {"m": model, "o": live})
    assert live.mine == [1, 2]
    with pytest.raises(KeyMismatch, match="an optimizer"):
        bind(saved, {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)})
