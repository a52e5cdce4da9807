"""Saves of, and loads into, a model that is still arriving: they wait, and give and take what a load would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.hot.starts import LONG_S, SMALL, assert_same, fresh, held, step, trained
from tests.state.alike import assert_alike
from tierload.engine import hot_start
from tierload.heat import HeatMeter

State = dict[str, object]
SAVES: dict[str, Callable[[State, Path], object]] = {
    "save": lambda state, path: tierload.save(state, path, settings=SMALL),
    "async_save": lambda state, path: tierload.async_save(state, path, settings=SMALL).result(),
    "prepare": lambda state, path: (tierload.prepare(state, path), tierload.save(state, path)),
}


@pytest.mark.parametrize("way", SAVES)
def test_a_save_waits_and_stores_the_right_bytes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model, optimizer = trained(store)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        tierload.hot_start(store, warm, its)
        assert not tierload.guard(its).reason, "which is known without their bytes"
        thread = threading.Thread(
            target=lambda: SAVES[way]({"model": warm, "optimizer": its}, tmp_path / "other"), daemon=True
        )
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "it did not wait"
        go.set()
        thread.join(LONG_S)
    loaded, his = fresh(3)
    tierload.load(tmp_path / "other", into={"model": loaded, "optimizer": his})
    assert_same(model, loaded)
    assert_alike(optimizer.state_dict(), his.state_dict())


def test_an_optimizer_alone_is_saved_whole(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are the last to arrive."""
    _, optimizer = trained(store)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        boot = tierload.hot_start(store, warm, its)
        threading.Timer(0.05, go.set).start()
        tierload.save({"optimizer": its}, tmp_path / "other", settings=SMALL)
    boot.join()
    _, his = fresh(3)
    tierload.load(tmp_path / "other", into={"optimizer": his}, strict=False)  # by position
    assert_alike(optimizer.state_dict(), his.state_dict())


def test_shared_memory_is_seen_before_it_is_there(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store)
    with held(monkeypatch):
        warm, its = fresh(2)
        warm.share_memory()
        tierload.hot_start(store, warm, its)
        assert "shared memory" in tierload.guard(its).reason


def test_a_load_into_what_arrives_comes_after_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(store)
    step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, store, step=3, settings=SMALL)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        boot = tierload.hot_start(store, warm, its, step=2)
        threading.Timer(0.05, go.set).start()
        tierload.load(store, into={"model": warm, "optimizer": its})
    boot.join()
    assert_same(model, warm)
    assert_alike(optimizer.state_dict(), its.state_dict())


def test_tensors_come_in_the_order_that_a_meter_recorded(store: Path) -> None:
    model, optimizer = fresh()
    meter = HeatMeter(model, optimizer)
    step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, store, settings=SMALL, heat=meter)
    boot = tierload.hot_start(store, fresh(2)[0])
    assert boot.stages[1].told.endswith("in the order of heat")
    boot.join()


# -- what people see


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_when_asked_for(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], progress: bool
) -> None:
    monkeypatch.setattr("tierload.observe.progress._LINE_S", 0.0)
    trained(store)
    with held(monkeypatch) as go:
        boot = tierload.hot_start(store, fresh(2)[0], progress=progress)
        shown = [one for one in threading.enumerate() if one.name == "tierload-progress"]
        assert len(shown) == progress
        for one in shown:
            one.join(0.3)  # it draws every 0.1 s
        go.set()
        boot.join()
    for one in shown:
        one.join(LONG_S)
        assert not one.is_alive()
    told = capsys.readouterr()
    assert told.out == ""
    if progress:
        line = told.err.splitlines()[0]
        assert line.startswith("tierload: hot start of step 2: 0 B of about ")
        assert line.endswith(" 0 of 29 tensors")
    else:
        assert told.err == ""


def test_neither_a_model_nor_a_target(store: Path) -> None:
    trained(store)
    with tierload.open(store) as opened, pytest.raises(tierload.InvalidRequest, match=r"a model, or .* \(into=\)"):
        opened.hot_start()


def test_a_target_by_keys(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained(store, steps={"done": 2})
    with held(monkeypatch) as go, tierload.open(store) as opened:
        warm, steps = fresh(2)[0], {"done": 0}
        parts = {"model": warm, "steps": steps}
        boot = opened.hot_start(into=parts, keys=["model", "steps"])
        assert steps == {"done": 2}, "what is no tensor is there at once"
        assert not boot.ready
        go.set()
    boot.join()
    assert_same(model, warm)
    with tierload.open(store) as opened, pytest.raises(tierload.KeyMismatch, match="other"):
        opened.hot_start(into={"model": warm}, keys=["model", "other"])
    assert isinstance(warm.words.weight, torch.nn.Parameter)


def test_states_of_the_optimizer_come_last(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was scheduled, in the order in which it is fetched where nobody asks for anything."""
    trained(store)
    seen: list[list[bool]] = []
    ranks = hot_start._ranks

    def watched(positions: Any, units: Any, heat: Any) -> Any:
        found = ranks(positions, units, heat)
        seen.append([units[number].state for number in np.argsort(found)])
        return found

    monkeypatch.setattr(hot_start, "_ranks", watched)
    tierload.hot_start(store, *fresh(2)).join()
    (order,) = seen
    assert order == sorted(order)
    assert 0 < sum(order) < len(order)
