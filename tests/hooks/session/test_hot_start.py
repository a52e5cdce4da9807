"""A session that begins while its weights arrive: the same losses, and saves, errors and ends that wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.hooks.session.toys import Toy, saved
from tests.hot.starts import SMALL, damage, held
from tierload import Session

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")


def train(store: Path, steps: int, *, seed: int = 0, patch: pytest.MonkeyPatch | None = None, **more: Any) -> list[str]:
    """The losses of a run. With ``patch`` it is a hot start, and nothing is there before the first batch is."""
    toy = Toy(seed=seed, compiled=more.pop("compiled", False))
    losses = []
    with held(patch or pytest.MonkeyPatch()) as go:
        with Session(store, every=4, hot_start=patch is not None, **toy.parts, **more) as run:
            batches = run.batches(toy.loader)
            for _ in run.steps(steps):
                batch = next(batches)
                if patch is not None and not losses:
                    assert run.hot_start is not None
                    assert (run.hot_start.progress.tensors, run.step) == (0, 4)
                    assert run.hot_start.progress.total_tensors > 20, "of the model, its averages, and the optimizer"
                    go.set()
                losses.append(toy.step(batch).item().hex())
        assert run.hot_start is None or run.hot_start.ready
    return losses


@pytest.mark.parametrize("more", [{}, {"heat": True}, pytest.param({"compiled": True}, marks=pytest.mark.slow)])
def test_the_losses_are_those_of_a_run_that_was_never_interrupted(
    ram: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    whole = train(ram / "whole", 12, **more)
    train(ram / "parts", 4, **more)
    assert train(ram / "parts", 12, seed=5, patch=monkeypatch, **more) == whole[4:]
    assert saved(ram / "parts") == [4, 8, 12]
    ours, theirs = (tierload.load(ram / name, keys=["model", "ema", "optimizer"]) for name in ("parts", "whole"))
    assert str(ours) == str(theirs)


def test_a_new_run_has_nothing_to_wait_for(ram: Path) -> None:
    with Session(ram / "run", every=1, hot_start=True, model=torch.nn.Linear(2, 2)) as run:
        assert run.hot_start is None


def parts() -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "spare": {"tensor": torch.randn(5000), "array": np.zeros(5000)}}


def test_values_that_cannot_wait_are_there(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(ram / "run", every=1, **(first := parts())) as run:
        first["spare"]["array"][:] = 7
        assert [*run.steps(1)] == [1]
    with held(monkeypatch) as go, Session(ram / "run", every=1, hot_start=True, **(again := parts())) as run:
        assert again["spare"]["array"].sum() == 35000
        assert run.step == 1
        go.set()


@pytest.mark.parametrize("steps", [1, 2])
def test_damage_is_raised_at_the_run(ram: Path, steps: int) -> None:
    """At the save of step 2, or where there is none at the end of the block."""
    with Session(ram / "run", every=1, settings=SMALL, **parts()) as run:
        assert [*run.steps(1)] == [1]
    damage(ram / "run", "spare/tensor")

    def go_on() -> None:
        with Session(ram / "run", every=1, hot_start=True, **parts()) as run:
            assert run.hot_start is not None
            for _ in run.steps(steps):
                pass

    with pytest.raises(tierload.CorruptPage, match="spare/tensor"):
        go_on()
    assert saved(ram / "run") == [1]


def test_an_error_of_the_program_is_the_one_that_is_raised(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(ram / "run", every=1, **parts()) as run:
        assert [*run.steps(1)] == [1]
    again = Session(ram / "run", every=1, hot_start=True, **parts())
    with held(monkeypatch), pytest.raises(ZeroDivisionError), again:
        raise ZeroDivisionError
    assert again.hot_start is not None
    again.hot_start.join()  # it goes on beside whoever has caught that


def test_what_does_not_fit_is_refused_at_once(ram: Path) -> None:
    with Session(ram / "run", every=1, **parts()) as run:
        assert [*run.steps(1)] == [1]
    other = Session(ram / "run", every=1, hot_start=True, **(parts() | {"more": {"x": 1}}))
    with pytest.raises(tierload.KeyMismatch, match="more") as told, other:
        pass
    assert "does not fit the parts of this session" in told.value.__notes__[0]
    with pytest.raises(tierload.InvalidRequest, match="use True or False"):
        Session(ram / "run", every=1, hot_start=2)  # type: ignore[arg-type]
