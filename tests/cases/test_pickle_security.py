"""B66: nothing is unpickled unless the user says so, and every random state is restored without it."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it derives from pickle's classes

import tierload
from tests.cases.stores import let_go
from tests.rescue.builder import Builder
from tests.state.alike import assert_alike
from tierload import UnsupportedValue


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a pickle, in whatever way, is a failure from here on."""

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("something is being unpickled")

    for place, names in ((pickle, "load loads Unpickler _Unpickler"), (torch, "load"), (np, "load")):
        for name in names.split():
            monkeypatch.setattr(place, name, refuse)


def test_b66_saving_needs_permission(store: Path, ram: Path) -> None:
    with pytest.raises(UnsupportedValue, match=r"'sidecar'.*Payload.*allow_pickle"):
        tierload.save({"sidecar": Payload(ram / "mark")}, store)
    assert not (ram / "mark").exists()


def test_b66_loading_needs_permission_too(store: Path, ram: Path) -> None:
    mark = ram / "mark"
    tierload.save({"sidecar": Payload(mark), "w": torch.ones(2)}, store, allow_pickle=True)
    let_go(store)
    for load in (
        lambda: tierload.load(store),
        lambda: tierload.load(store, keys="sidecar"),
        lambda: tierload.load(store, into={"sidecar": None, "w": torch.zeros(2)}),
        lambda: tierload.open(store).load(),
    ):
        with pytest.raises(UnsupportedValue, match=r"sidecar.*allow_pickle"):
            load()
    assert tierload.open(store).verify(full=True).ok
    with tierload.open(store) as opened:
        opened.keys(), opened.commits(), list(opened.history())
    assert torch.equal(tierload.load(store, keys="w")["w"], torch.ones(2)), "the rest can be had"
    assert not mark.exists(), "the payload has run"
    tierload.load(store, allow_pickle=True)
    assert mark.exists(), "with permission it is a pickle like any other"


def test_b66_a_forged_store(ram: Path, no_pickle: None) -> None:
    """A pickle where the user never wrote one, in the state and in the metrics."""
    payload = {"pickle": "gASVIQAAAAAAAACMBXBvc2l4lIwFbWtkaXKUk5SMBS90bXAveZSFlFKULg=="}
    builder = Builder(ram / "state")
    builder.commit({}, payload, meta={"metrics": {"d": {}}})
    with pytest.raises(UnsupportedValue, match="pickle"):
        tierload.load(ram / "state")
    builder = Builder(ram / "metrics")
    builder.commit({}, {"d": {"a": 1}}, meta={"metrics": {"d": {"x": payload}}})
    with pytest.raises(tierload.TierloadError, match="pickle"):
        tierload.open(ram / "metrics").commits()


def generators() -> dict[str, object]:
    return {
        "rng": tierload.RNG(),
        "python": random.Random(3),
        "MT19937": np.random.RandomState(4),
        **{
            name: np.random.Generator(getattr(np.random, name)(5))
            for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
        },
        "torch": torch.Generator().manual_seed(6),
    }


def draw(state: dict[str, object]) -> list[object]:
    out: list[object] = [random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(2).tolist()]
    for name, generator in state.items():
        if isinstance(generator, random.Random):
            out.append(generator.gauss(0, 1))
        elif isinstance(generator, (np.random.RandomState, np.random.Generator)):
            out.append(generator.normal())
        elif name == "torch":
            out.append(torch.rand(2, generator=generator).tolist())  # type: ignore[call-overload]
    return out


def test_b66_every_random_state_is_restored_without_pickle(store: Path, no_pickle: None) -> None:
    state = generators()
    draw(state)
    tierload.save(state, store)
    expected = draw(state)
    let_go(store)
    fresh = generators()
    tierload.load(store, into=fresh)
    assert draw(fresh) == expected
    found = tierload.load(store)
    assert isinstance(found["PCG64"], np.random.Generator)
    tierload.load(store, into={"rng": fresh["rng"]}, keys="rng")
    assert draw(found | {"rng": fresh["rng"]}) == expected


def test_b66_the_default_path_never_unpickles(store: Path, no_pickle: None) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "numpy": np.arange(3), "odd": {(1, None): {2}}, "b": b"x" * 99}
    tierload.save(state, store, metrics={"loss": 1.0})
    let_go(store)
    assert_alike(tierload.load(store)["numpy"], np.arange(3))
    tierload.load(store, into=state)
    assert json.loads(json.dumps(dict(tierload.open(store).commits()[0].metrics))) == {"loss": 1.0}


def test_b66_a_random_state_that_cannot_be_restored_is_loud(store: Path) -> None:
    """Another kind of generator in the target: an error, not a run that goes on with other numbers."""
    tierload.save({"noise": np.random.default_rng(1)}, store)
    target = {"noise": np.random.Generator(np.random.Philox(1))}
    before = target["noise"].bit_generator.state
    with pytest.raises(tierload.KeyMismatch, match=r"noise.*PCG64.*Philox|noise.*Philox.*PCG64"):
        tierload.load(store, into=target)
    assert_alike(target["noise"].bit_generator.state, before)
