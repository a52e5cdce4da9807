"""Damage that a hot start meets, starts that have ended early, and what may still become of the model."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.hot.starts import LONG_S, SMALL, WORDS, Model, assert_same, damage, fresh, held, step, trained
from tests.state.alike import assert_alike
from tierload import CorruptPage, KeyMismatch, Settings
from tierload.engine.arriving import Arrivals
from tierload.errors import HotStartClosed

LATER = "model/blocks.1.recurrence.weight_hh_l0"
STATE = "optimizer/state/model~1blocks.1.recurrence.weight_hh_l0/exp_avg_sq"


def test_a_damaged_state_is_raised_by_step(store: Path) -> None:
    trained(store)
    damage(store, STATE)
    warm, its = fresh(2)
    boot = tierload.hot_start(store, warm, its)
    warm(WORDS).square().mean().backward()
    for use in (its.step, its.step, lambda: boot.wait(STATE), boot.join):
        with pytest.raises(CorruptPage) as error:
            use()
        assert error.value.key == STATE


def test_a_model_whose_later_layer_is_damaged(store: Path) -> None:
    """What is before it computes, forwards and backwards."""
    torch.manual_seed(1)
    model, warm = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))) for _ in range(2))
    tierload.save({"model": model}, store, settings=Settings(page_bytes=4096, compression="off", pack_below_bytes=64))
    damage(store, "model/2.weight")
    tierload.hot_start(store, warm)
    ones = torch.ones(2, 64)
    for net in (model, warm):
        net[:2](ones).sum().backward()
    assert_alike([one.grad for one in warm[:2].parameters()], [one.grad for one in model[:2].parameters()])
    for use in (lambda: warm(ones), lambda: warm[2].weight.sum().backward()):
        with pytest.raises(CorruptPage) as error:
            use()
        assert error.value.key == "model/2.weight"
    assert warm[2].weight.grad is None


def test_a_packed_page_is_told_by_the_tensor_that_was_used(store: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    tierload.save({"model": model}, store, settings=SMALL)
    damage(store, "model/0.weight")
    warm = copy.deepcopy(model)
    tierload.hot_start(store, warm)
    for name in ("2.bias", "0.bias", "1.weight"):
        with pytest.raises(CorruptPage, match=f"key 'model/{name}' and 5 more") as error:
            warm.get_parameter(name) + 0
        assert error.value.key == f"model/{name}"


def test_a_missing_segment_is_told_once(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained(store)
    segments = len(list((store / "seg").iterdir()))
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        boot = tierload.hot_start(store, warm, its)
        shutil.rmtree(store)
        go.set()
        with pytest.raises(CorruptPage, match="the segment is missing"):
            boot.join()
    told = [line for line in caplog.messages if boot.commit.id[:12] in line]
    assert len(told) == segments + 1
    assert all("the segment is missing" in line for line in told[:-1])
    assert told[-1].endswith(f"has gone without {boot.progress.total_tensors} tensors")


# -- a model that was not completed can be loaded into


def load(path: Path, warm: Model, its: torch.optim.Optimizer, **more: Any) -> None:
    tierload.load(path, into={"model": warm, "optimizer": its}, **more)


def start(path: Path, warm: Model, its: torch.optim.Optimizer, **more: Any) -> None:
    tierload.hot_start(path, warm, its, **more).join()


@pytest.mark.parametrize("repair", [load, start])
@pytest.mark.parametrize("ended", ["damaged", "closed", "under way"])
def test_another_load_completes_it(
    store: Path, monkeypatch: pytest.MonkeyPatch, repair: Callable[..., None], ended: str
) -> None:
    model, optimizer = trained(store)
    expected, states = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, store, step=3, settings=SMALL)
    damage(store, LATER)
    damage(store, STATE)
    warm, its = fresh(3)
    if ended == "closed":
        with held(monkeypatch) as go:
            boot = tierload.hot_start(store, warm, its)
            boot._arrivals.native.stop()
            go.set()
            boot.close()
    else:
        boot = tierload.hot_start(store, warm, its)
        with pytest.raises(CorruptPage):
            boot.wait(LATER) if ended == "under way" else boot.join()
    repair(store, warm, its, step=2)
    assert_same(expected, warm)
    assert_alike(its.state_dict(), states)
    assert step(warm, its) == step(*restored(expected, states))


def restored(model: Model, states: dict[str, Any]) -> tuple[Model, torch.optim.AdamW]:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(states)
    return model, optimizer


def test_another_load_comes_after_what_is_under_way(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor with one damaged page, other pages may come later: not over what has been loaded."""

    def lost(unit: int, timeout: float | None) -> bool:
        raise CorruptPage("damaged")

    model, optimizer = trained(store)
    expected = copy.deepcopy(model)
    step(model, optimizer)
    tierload.save({"model": model, "optimizer": optimizer}, store, step=3, settings=SMALL)
    with held(monkeypatch) as go:
        warm, its = fresh(3)
        boot = tierload.hot_start(store, warm, its)
        with monkeypatch.context() as patch:
            patch.setattr(boot._arrivals, "_arrive", lost)
            thread = threading.Thread(target=load, args=(store, warm, its), kwargs={"step": 2}, daemon=True)
            thread.start()
            thread.join(0.1)
            assert thread.is_alive(), "it did not wait"
            go.set()
            thread.join(LONG_S)
    assert_same(expected, warm)


def test_what_no_other_load_fills_raises_as_before(store: Path, ram: Path) -> None:
    model, _ = trained(store)
    tierload.save({"model": {"words.weight": model.words.weight}}, ram / "other", settings=SMALL)
    damage(store, LATER)
    warm, _ = fresh(2)
    boot = tierload.hot_start(store, warm)
    for load in (tierload.load, tierload.hot_start):
        into = {"into": {"model": warm}} if load is tierload.load else {"model": warm, "key": "model"}
        for strict in (True, False):
            if strict:
                with pytest.raises(KeyMismatch):
                    load(ram / "other", **into)  # type: ignore[operator]
            else:
                load(ram / "other", **into, strict=False)  # type: ignore[operator]
            with pytest.raises(CorruptPage) as error:
                warm.blocks[1](torch.ones(1, 2, 32))
            assert error.value.key == LATER
    assert torch.equal(warm.words.weight, model.words.weight)
    with pytest.raises(CorruptPage):
        boot.join()


# -- interrupts


def interrupted(use: Callable[[], object]) -> None:
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        use()
    timer.join()


def test_waits_can_be_interrupted_and_begun_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(store)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        boot = tierload.hot_start(store, warm, its)
        for use in (boot.join, lambda: boot.wait("out.weight"), lambda: warm(WORDS), lambda: warm.out.weight + 0):
            interrupted(use)
        assert not boot.ready
        go.set()
        boot.join()
    assert_same(model, warm)
    assert step(warm, its) == step(model, optimizer)


def test_an_interrupted_block_fetches_nothing_more(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store)
    warm, _ = fresh(2)
    with held(monkeypatch) as go:

        def block() -> None:
            with tierload.hot_start(store, warm) as boot:
                boot._arrivals.native.stop()  # so that nothing comes between
                threading.Timer(0.1, go.set).start()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            block()
    with pytest.raises(HotStartClosed, match="was not there yet when the hot start was closed"):
        warm(WORDS)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("can't start new thread")])
def test_a_start_that_fails_leaves_nothing_behind(store: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    model, _ = trained(store)
    hooks, run, warm = dict(nn.modules.module._global_forward_pre_hooks), Arrivals.run, fresh(2)[0]

    def refused(self: Arrivals, work: Callable[[], None]) -> None:
        if work == self._watch:
            raise error
        run(self, work)

    monkeypatch.setattr(Arrivals, "run", refused)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        tierload.hot_start(store, warm)
    monkeypatch.undo()
    assert nn.modules.module._global_forward_pre_hooks == hooks
    tierload.load(store, into={"model": warm}, strict=False)
    assert_same(model, warm)


def test_one_start_after_another_into_the_same_model(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(store)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        first = tierload.hot_start(store, warm, its)
        threading.Timer(0.05, go.set).start()
        second = tierload.hot_start(store, warm, its)
    second.join()
    first.close()
    third = tierload.hot_start(store, warm, its)
    second.close()
    third.join()
    assert_same(model, warm)
    assert step(warm, its) == step(model, optimizer)
