"""B81 and B83: what is missing, too much, or of another shape is told, all at once, and nothing is half applied."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from typer.testing import CliRunner

import tierload
from tests.cases.stores import let_go
from tests.state.alike import assert_alike
from tests.state.models import Extra, Renaming, Rotary
from tierload import CorruptPage, KeyMismatch
from tierload.cli import app


class Net(nn.Module):
    """Its tensors have the given shapes; names may be changed by a test."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


SHAPES = {"a": (3, 3), "b": (4,), "c": (2, 5), "d": (6, 1)}


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sum(p.pow(2).sum() for p in model.parameters()).backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def saved(store: Path) -> Path:
    model = Net(**SHAPES)
    tierload.save({"model": model, "optimizer": trained(model), "epoch": 3}, store, step=1)
    let_go(store)
    return store


def contents(state: dict[str, Any]) -> Any:
    return copy.deepcopy({k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()})


def every_entry_point(path: Path, into: Any) -> list[Callable[..., Any]]:
    reader, writer = tierload.open(path), tierload.open(path, mode="w")
    return [
        lambda **more: tierload.load(path, into=into, **more),
        lambda **more: reader.load(into=into, **more),
        lambda **more: writer.load(into=into, **more),
        lambda **more: tierload.load(path, into=into, step=1, **more),
    ]


def test_b81_everything_is_told_at_once_and_nothing_is_changed(saved: Path) -> None:
    """One key too few, one too many, one renamed, one of another shape, and the optimizer beside it."""
    model = Net(a=(3, 3), renamed=(4,), c=(1, 5), new=(2,))
    target = {"model": model, "optimizer": trained(model), "epoch": 0, "more": 5}
    before = contents(target)
    for load in every_entry_point(saved, target):
        with pytest.raises(KeyMismatch) as found:
            load()
        error = found.value
        assert {"model/renamed", "model/new", "more"} <= set(error.missing)
        assert {"model/b", "model/d"} <= set(error.unexpected)
        assert "model/c" in error.shapes
        for name in ("model/renamed", "model/new", "model/b", "model/d", "model/c", "(2, 5)", "(1, 5)"):
            assert name in str(error), name
        assert any("optimizer" in key for key in (*error.missing, *error.unexpected))
        assert "strict=False" in str(error), "what to do"
        assert_alike(contents(target), before)


@pytest.mark.parametrize(
    ("stored", "live"), [((1, 5), (3, 5)), ((3, 5), (1, 5)), ((1,), (4,)), ((4,), (4, 1)), ((), (1,)), ((0,), (1,))]
)
def test_b81_shapes_are_never_broadcast(store: Path, stored: tuple[int, ...], live: tuple[int, ...]) -> None:
    tierload.save({"w": torch.randn(stored), "v": torch.ones(2)}, store)
    target = {"w": torch.zeros(live), "v": torch.zeros(2)}
    with pytest.raises(KeyMismatch) as found:
        tierload.load(store, into=target)
    assert found.value.shapes == ("w",)
    assert not target["w"].any()
    assert not target["v"].any()
    report = tierload.load(store, into=target, strict=False)
    assert report.shapes == ("w",)
    assert report.loaded == ("v",)
    assert not target["w"].any()


def test_b81_strict_false_reports(saved: Path) -> None:
    model = Net(a=(3, 3), renamed=(4,), c=(1, 5), d=(6, 1))
    before = contents({"model": model})["model"]
    report = tierload.load(saved, into={"model": model}, strict=False)
    assert report.loaded == ("model/a", "model/d")
    assert report.missing == ("model/renamed",)
    assert {"epoch", "model/b"} <= set(report.unexpected)
    assert report.shapes == ("model/c",)
    stored = tierload.load(saved)["model"]
    assert_alike(model.state_dict()["a"], stored["a"])
    assert_alike(model.state_dict()["renamed"], before["renamed"])
    assert_alike(model.state_dict()["c"], before["c"])


@pytest.mark.parametrize("change", ["frozen", "fewer", "more", "other"])
def test_b81_optimizers_are_strict_too(saved: Path, change: str) -> None:
    model = Net(**SHAPES)
    parameters = list(model.parameters())
    extra = nn.Parameter(torch.zeros(2))
    chosen = {"fewer": parameters[:-1], "more": [*parameters, extra], "other": [*parameters[:-1], extra]}
    optimizer = torch.optim.Adam(chosen.get(change, parameters), lr=0.5)
    target: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    if change == "frozen":
        target.pop("optimizer")
    before = contents(target)
    with pytest.raises(KeyMismatch, match="optimizer"):
        tierload.load(saved, into=target)
    assert_alike(contents(target), before)


@pytest.mark.parametrize("stepped", [False, True])
def test_b81_moments_of_a_parameter_of_another_shape(saved: Path, stepped: bool) -> None:
    """They would be broadcast at the next step: told for the optimizer alone too, and left out by strict=False."""
    model = Net(**(SHAPES | {"c": (5, 5)}))
    optimizer = trained(model) if stepped else torch.optim.Adam(model.parameters(), lr=0.5)
    target = {"model": model, "optimizer": optimizer}
    before = contents(target)
    for options in ({"keys": ["optimizer"]}, {"keys": ["optimizer", "model"]}):
        with pytest.raises(KeyMismatch, match=r"\(5, 5\) in the target and \(2, 5\) in the store") as found:
            tierload.load(saved, into=target, **options)
        assert "optimizer/state/model~1c" in found.value.shapes
        assert_alike(contents(target), before)
    report = tierload.load(saved, into=target, strict=False)
    assert report.shapes == ("model/c", "optimizer/state/model~1c")
    assert (model.c in optimizer.state) == stepped
    if stepped:
        assert_alike(optimizer.state_dict()["state"][2], before["optimizer"]["state"][2])
    assert optimizer.state[model.a]["exp_avg"].shape == (3, 3)


@pytest.mark.parametrize("entry", ["nested", "flattened", "wrapped", "state dict of a wrapper"])
def test_b81_by_fully_qualified_names_and_in_wrappers(store: Path, entry: str) -> None:
    """Everything at once, whatever the names are written in: and nothing is changed."""
    model: nn.Module = Net(**SHAPES)
    optimizer = trained(model)
    if entry in ("nested", "flattened"):
        options = StateDictOptions(flatten_optimizer_state_dict=entry == "flattened")
        state = {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    else:
        wrapped = nn.DataParallel(model)
        state = {"model": wrapped.state_dict() if "dict" in entry else wrapped, "optimizer": optimizer}
    tierload.save(state, store)
    other = nn.DataParallel(Net(a=(3, 3), renamed=(4,), c=(1, 5), d=(6, 1), new=(2,)))
    target = {"model": other, "optimizer": trained(other)}
    before = contents(target)
    with pytest.raises(KeyMismatch) as found:
        tierload.load(store, into=target)
    name = "model/module.b" if "dict" in entry else "model/b"
    assert {"model/renamed", "model/new"} <= set(found.value.missing)
    assert {name, name.replace("model/", "optimizer/state/model~1")} & set(found.value.unexpected)
    assert len([key for key in found.value.shapes if key.startswith("model/")]) == 1
    assert [key for key in found.value.shapes if key.startswith("optimizer/state")]
    assert_alike(contents(target), before)


def test_b81_dtypes(store: Path) -> None:
    tierload.save({"w": torch.tensor([1.5, 2.5]), "n": torch.tensor([3])}, store)
    target = {"w": torch.zeros(2, dtype=torch.float16), "n": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(KeyMismatch) as found:
        tierload.load(store, into=target)
    assert found.value.dtypes == ("n", "w")
    assert "cast=True" in str(found.value)
    assert not target["w"].any()


def test_b81_modules_with_hooks(store: Path) -> None:
    """A hook that renames keys is heard; what it cannot explain is an error all the same."""
    tierload.save({"m": {"old": torch.ones(3)}}, store)
    model = Renaming()
    tierload.load(store, into={"m": model})
    assert torch.equal(model.weight, torch.ones(3))
    assert model.calls
    tierload.save({"m": {"older": torch.zeros(3)}}, store)
    with pytest.raises((KeyMismatch, RuntimeError), match="weight"):
        tierload.load(store, into={"m": model})
    assert torch.equal(model.weight, torch.ones(3))
    extra = Extra()
    extra.count = 7
    tierload.save({"m": extra}, store)
    other = Extra()
    tierload.load(store, into={"m": other})
    assert other.count == 7
    tierload.save({"m": {"weight": torch.ones(2)}}, store)
    with pytest.raises(KeyMismatch, match="_extra_state"):
        tierload.load(store, into={"m": other})


def test_b81_a_pattern_that_matches_nothing(saved: Path) -> None:
    with pytest.raises(KeyMismatch, match="modle"):
        tierload.load(saved, keys=["epoch", "modle/*"])
    with pytest.raises(KeyMismatch, match="modle"):
        tierload.load(saved, into={"epoch": 0}, keys=["epoch", "modle/*"])


def test_b81_damage_in_the_middle_says_what_was_overwritten(store: Path) -> None:
    """Pages are checked as they arrive, so a target may be filled in part: the error lists those keys."""
    settings = tierload.Settings(page_bytes=4096, pack_below_bytes=0, compression="off", threads=1)
    state = {name: torch.full((2000,), float(n)) for n, name in enumerate("abcdef", 1)}
    tierload.save(state, store, settings=settings)
    let_go(store)
    (segment,) = (store / "seg").iterdir()
    data = bytearray(segment.read_bytes())
    data[3 * 8192 + 5] ^= 1  # in d
    segment.write_bytes(data)
    target = {name: torch.zeros(2000) for name in state}
    with pytest.raises(CorruptPage, match="'d'") as found:
        tierload.load(store, into=target)
    assert found.value.overwritten
    for name, tensor in target.items():
        assert name in found.value.overwritten or not tensor.any(), f"{name} was changed and is not listed"
        if name in found.value.overwritten:
            assert name in str(found.value)


def test_b81_by_command(saved: Path) -> None:
    """The command line lists what is there, so that both sides can be compared before anything is loaded."""
    done = CliRunner().invoke(app, ["show", str(saved), "--json"])
    assert done.exit_code == 0, done.output
    assert {"model/a", "model/b"} <= {info["key"] for info in json.loads(done.output)["keys"]}


# -- B83


def test_b83_buffers_that_are_not_stored_are_never_left_as_garbage(store: Path) -> None:
    reference = Rotary()
    tierload.save({"model": reference}, store)
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(KeyMismatch, match="inv_freq"):
        tierload.load(store, into={"model": model})
    assert model.proj.weight.is_meta, "nothing was changed"
    model.inv_freq = torch.arange(4.0)
    tierload.load(store, into={"model": model})
    assert_alike(model.state_dict(), reference.state_dict())
    assert torch.equal(model.inv_freq, torch.arange(4.0))
