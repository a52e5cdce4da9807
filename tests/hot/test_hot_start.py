"""A hot start: what is used at once is what a load gives."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import tierload
from tests.hot.starts import LONG_S, SMALL, WORDS, Block, Model, assert_same, fresh, held, step, trained
from tests.state.alike import assert_alike
from tierload import HotStartTimeout, InvalidRequest, KeyMismatch


def test_a_training_goes_on_as_after_a_load(store: Path) -> None:
    model, optimizer = trained(store)
    warm, its = fresh(2)
    boot = tierload.hot_start(store, warm, its)
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [step(warm, its) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]
    boot.join()
    assert boot.ready
    assert_same(model, warm)
    assert_alike(optimizer.state_dict(), its.state_dict())


def test_it_is_what_a_load_gives(store: Path) -> None:
    trained(store)
    (loaded, his), (warm, its) = fresh(2), fresh(3)
    report = tierload.load(store, into={"model": loaded, "optimizer": his}, strict=False)
    assert tierload.hot_start(store, warm, its).join().loaded == report.loaded  # type: ignore[attr-defined]
    assert_same(loaded, warm)
    assert_alike(his.state_dict(), its.state_dict())


def test_four_stages_are_timed(store: Path) -> None:
    trained(store)
    boot = tierload.hot_start(store, fresh(2)[0])
    assert [stage.name for stage in boot.stages] == ["open", "cold", "hot", "bind"]
    assert all(stage.seconds > 0 for stage in boot.stages)
    far = boot.join() and boot.progress
    assert far.tensors == far.total_tensors
    assert far.bytes == far.total_bytes > 0


def detached(values: object) -> object:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, values)


def pickled(state: object) -> object:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


USES: dict[str, Callable[[Model], object]] = {
    "forward": lambda model: model(WORDS),
    "forward without gradients": lambda model: torch.no_grad()(model.eval())(WORDS),
    "state_dict": lambda model: dict(model.state_dict()),
    "deepcopy": lambda model: dict(copy.deepcopy(model).state_dict()),
    "pickle": lambda model: pickled(model.state_dict()),
    "numpy": lambda model: model.blocks[1].scale.detach().numpy().copy(),
    "data": lambda model: model.blocks[1].scale.data + 0,
    "tolist": lambda model: model.blocks[1].norm.running_mean.tolist(),
    "foreach": lambda model: torch._foreach_mul([*model.blocks[1].parameters()], 1.0),
    "a functional call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (WORDS,)),
    "a functional": lambda model: nn.functional.linear(torch.ones(32), model.words.weight),
    "another dtype": lambda model: dict(copy.deepcopy(model).double().state_dict()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "compiled": lambda model: torch.compile(model, backend="eager")(WORDS),
    "a compiled part": lambda model: (model.blocks[1].compile(backend="eager"), model(WORDS))[1],
    "an EMA": lambda model: dict(torch.optim.swa_utils.AveragedModel(model).state_dict()),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_waits(store: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    model, _ = trained(store)
    with held(monkeypatch) as go:
        warm, _ = fresh(2)
        tierload.hot_start(store, warm)
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(USES[use](warm)), daemon=True)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "it did not wait"
        go.set()
        thread.join(LONG_S)
    torch._dynamo.reset()
    assert_alike(detached(found), detached([USES[use](model)]))


def test_what_is_known_without_the_bytes_does_not_wait(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store)
    with held(monkeypatch):
        warm, _ = fresh(2)
        tierload.hot_start(store, warm)
        assert sum(parameter.numel() for parameter in warm.parameters()) == 28736
        weight = warm.words.weight
        assert (weight.shape, weight.dtype, weight.device.type) == ((100, 32), torch.float32, "cpu")
        assert weight.requires_grad
        assert isinstance(weight, nn.Parameter)
        torch.optim.SGD(warm.parameters(), lr=1)
        torch.optim.AdamW([{"params": list(warm.parameters()), "lr": 1}]).zero_grad()
        warm.requires_grad_(False).eval()
        repr(warm)


def test_one_tensor_can_be_waited_for(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store)
    with held(monkeypatch) as go:
        boot = tierload.hot_start(store, fresh(2)[0])
        with pytest.raises(HotStartTimeout, match=r"'out\.weight' is not there after 0\.01 s"):
            boot.wait("out.weight", 0.01)
        with pytest.raises(HotStartTimeout):
            boot.join(0.01)
        with pytest.raises(InvalidRequest, match=r"no tensor 'other'"):
            boot.wait("other")
        go.set()
        boot.wait("out.weight")
        boot.wait("model/blocks.0.scale")
        boot.join()


def test_a_closed_one_says_so(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store)
    warm, _ = fresh(2)
    with held(monkeypatch) as go:
        boot = tierload.hot_start(store, warm)
        boot._arrivals.native.stop()
        go.set()
        boot.close()
    with pytest.raises(tierload.TierloadError, match="was not there yet when the hot start was closed"):
        warm(WORDS)


# -- on meta


def test_a_model_on_meta(store: Path) -> None:
    model, _ = trained(store)
    with torch.device("meta"):
        warm = Model()
    names = [id(parameter) for parameter in warm.parameters()]
    boot = tierload.hot_start(store, warm)
    assert_alike(detached(warm.eval()(WORDS)), detached(model.eval()(WORDS)))
    boot.join()
    assert [id(parameter) for parameter in warm.parameters()] == names
    assert warm.out.weight is warm.words.weight
    assert_same(model, warm)
    assert all(one.data_ptr() % 64 == 0 for one in warm.parameters())


def test_b83_buffers_that_nobody_stores(store: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.rand(8), persistent=False)
            self.weight = nn.Parameter(torch.rand(8))

    tierload.save({"model": Rotary()}, store)
    with torch.device("meta"):
        warm = Rotary()
    with pytest.raises(KeyMismatch, match=r"frequencies.*is a buffer on the meta device.*compute it before loading"):
        tierload.hot_start(store, warm)
    assert warm.weight.is_meta
    warm.frequencies = torch.ones(8)
    tierload.hot_start(store, warm).join()
    assert warm.frequencies.tolist() == [1.0] * 8


# -- what differs


def test_b81_all_differences_are_told_and_nothing_changes(store: Path) -> None:
    trained(store)
    other = Model()
    other.more = nn.Linear(2, 2)
    del other.blocks[1].scale
    other.blocks[0].scale = nn.Parameter(torch.ones(1, 32))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(KeyMismatch) as error:
        tierload.hot_start(store, other)
    assert error.value.missing == ("model/more.bias", "model/more.weight")
    assert error.value.unexpected == ("model/blocks.1.scale",)
    assert error.value.shapes == ("model/blocks.0.scale",)
    assert_alike(dict(other.state_dict()), dict(before))
    report = tierload.hot_start(store, other, strict=False).join()
    assert report.missing == error.value.missing
    assert "model/blocks.1.norm.weight" in report.loaded


def test_where_the_model_is(store: Path) -> None:
    model, optimizer = fresh()
    other, _ = fresh(2)
    tierload.save({"a": model, "b": {"c": other}, "o": optimizer}, store, settings=SMALL)
    warm, its = fresh(3)
    with pytest.raises(KeyMismatch, match=r"stored more than once: at 'a', 'b/c'. Say which with key="):
        tierload.hot_start(store, warm)
    with pytest.raises(KeyMismatch, match=r"nothing is stored at 'd'"):
        tierload.hot_start(store, warm, key="d")
    tierload.hot_start(store, warm, key="b/c").join()
    assert_same(other, warm)
    tierload.hot_start(store, warm, its, key="a").join()
    assert_same(model, warm)
    with pytest.raises(KeyMismatch, match="nothing in the store has the names of this Linear"):
        tierload.hot_start(store, nn.Linear(2, 2))


FORMS: list[Callable[[nn.Module], object]] = [
    lambda model: model,
    lambda model: {"state": model.state_dict()},
    lambda model: model.state_dict(),
]


@pytest.mark.parametrize("as_stored", FORMS)
def test_other_forms_of_states(store: Path, as_stored: Callable[[nn.Module], object]) -> None:
    model, _ = fresh()
    tierload.save(as_stored(model), store, settings=SMALL)
    warm, _ = fresh(2)
    tierload.hot_start(store, warm).join()
    assert_same(model, warm)


def test_another_dtype(store: Path) -> None:
    model, _ = trained(store)
    warm = fresh(2)[0].to(torch.bfloat16)
    with pytest.raises(KeyMismatch, match="cast=True"):
        tierload.hot_start(store, warm)
    boot = tierload.hot_start(store, warm, cast=True)
    assert_alike(warm.blocks[0].scale.detach(), model.blocks[0].scale.detach().bfloat16())
    boot.join()
    assert_same(copy.deepcopy(model).bfloat16(), warm)


def test_what_cannot_wait_is_there(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in TorchScript, and with a loading of their own."""

    class Own(nn.Linear):
        def _load_from_state_dict(self, *args: object) -> None:
            super()._load_from_state_dict(*args)  # type: ignore[arg-type]
            self.seen = self.weight.sum().item()

    for make in (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), lambda: nn.Sequential(Own(4, 4))):
        model, warm = make(), make()
        tierload.save({"model": model}, store)
        with held(monkeypatch):
            tierload.hot_start(store, warm)
            assert_alike(detached(warm(torch.ones(4))), detached(model(torch.ones(4))))


def test_an_optimizer_of_another_kind(store: Path) -> None:
    """Its own load_state_dict computes with what it gets."""

    class Own(torch.optim.SGD):
        def load_state_dict(self, state: object) -> None:
            super().load_state_dict(state)  # type: ignore[arg-type]
            self.sums = [one["momentum_buffer"].sum().item() for one in self.state.values()]

    model = nn.Linear(8, 8)
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    tierload.save({"model": model, "optimizer": optimizer}, store)
    warm = nn.Linear(8, 8)
    its = Own(warm.parameters(), lr=0.2, momentum=0.9)
    tierload.hot_start(store, warm, its)
    assert its.sums == [one["momentum_buffer"].sum().item() for one in optimizer.state.values()]


def test_hooks_are_gone_when_it_is_over(store: Path) -> None:
    trained(store)
    warm, its = fresh(2)
    tierload.hot_start(store, warm, its).join()
    assert not any(module._forward_pre_hooks for module in warm.modules())
    assert not any(vars(parameter) for parameter in warm.parameters())
    assert isinstance(warm.blocks[0], Block)
