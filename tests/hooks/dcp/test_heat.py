"""DCP's save with a heat meter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import tierload
from tests.hooks.dcp.states import save
from tierload.heat import HeatMeter
from tierload.hooks.dcp import Writer


def test_a_commit_has_the_heat_of_the_models_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    meter = HeatMeter(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    save({"app": {"model": weights, "optimizer": moments}}, storage_writer=Writer(tmp_path / "store", heat=meter))
    with tierload.open(tmp_path / "store") as store:
        table = store.heat()
    assert table is not None
    assert sorted(table.keys) == ["app/model/bias", "app/model/weight"]
    assert table.gradient.min() > 0
