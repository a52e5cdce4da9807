"""A session with a heat meter: what commits have of it, and that a run goes on from it, with it and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierload
from tests.hooks.session.toys import Toy, saved
from tests.ranks.world import results
from tierload import InvalidRequest, Session
from tierload.heat import HeatMeter

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")


def train(store: Path, steps: int, *, heat: Any, compiled: bool = False) -> HeatMeter | None:
    toy = Toy(compiled=compiled)
    meter = HeatMeter(toy.plain, toy.optimizer) if heat == "own" else heat
    with Session(store, every=2, heat=meter, **toy.parts) as run:
        batches = run.batches(toy.loader)
        for _ in run.steps(steps):
            toy.step(next(batches))
    return run.meter


@pytest.mark.parametrize("heat", [True, "own"])
def test_a_resumed_run_goes_on_with_what_was_measured(ram: Path, heat: Any) -> None:
    whole = train(ram / "whole", 6, heat=heat)
    train(ram / "parts", 2, heat=heat)
    again = train(ram / "parts", 6, heat=heat)
    assert whole is not None
    assert again is not None
    assert again.scores() == whole.scores()
    with tierload.open(ram / "parts") as opened:
        tables = [opened.heat(commit) for commit in opened.commits()]
    assert len(tables) == 3
    newest = tables[0]
    assert newest is not None
    found = dict(zip(newest.keys, newest.heat.tolist(), strict=True))
    assert found == pytest.approx({f"model/{name}": heat.heat for name, heat in whole.scores().items()})


def test_a_run_goes_on_with_heat_without_it_and_under_a_wrapper(store: Path) -> None:
    assert train(store, 2, heat=False) is None
    train(store, 4, heat=True)
    train(store, 6, heat=True, compiled=True)
    train(store, 8, heat=False)
    assert saved(store) == [2, 4, 6, 8]
    with tierload.open(store) as opened:
        assert [opened.heat(step) is not None for step in (2, 4, 6, 8)] == [False, True, True, False]


def test_what_cannot_be_measured_is_refused(store: Path) -> None:
    toy = Toy()
    more = torch.optim.SGD(toy.model.parameters())
    with pytest.raises(InvalidRequest, match="2 and 1 of them; make the meter that you mean"):
        Session(store, every=1, heat=True, more=more, **toy.parts)
    heat: Any = 3
    with pytest.raises(InvalidRequest, match="heat is 3; use True"):
        Session(store, every=1, heat=heat, **toy.parts)


def of_ranks(rank: int, ranks: int, path: str, steps: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with tierload.Session(path, every=2, heat=True, model=model, optimizer=optimizer) as run:
        for step in run.steps(steps):
            optimizer.zero_grad()
            model(torch.arange(4) + 16 * rank + step).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        assert run.meter is not None
        return run.meter.scores(), run.meter.state_dict()["locality"]["rows"][0]["long"]["sum"].tolist()  # type: ignore[index]


@pytest.mark.slow
def test_each_rank_goes_on_with_what_it_has_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    whole = results(2, of_ranks, path, 4)
    with tierload.open(path, mode="w") as store:
        store.rollback(2)
    assert results(2, of_ranks, path, 4) == whole
    assert whole[0][1] != whole[1][1], "each rank has looked up words of its own"
