"""Models in wrappers, by the calls and commands of a user: one store for a model, whatever it is wrapped in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

import tierload
from tests.cases.stores import let_go
from tests.state.alike import assert_alike
from tests.state.models import TinyLM, train
from tierload.cli import app


def test_a_run_that_changes_its_wrappers(store: Path) -> None:
    """Compiled at first, then bare, then in DataParallel: nothing is stored anew, and training goes on bit for bit."""
    torch.manual_seed(0)
    model = TinyLM()
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01, foreach=False)
    train(compiled, optimizer, 2)
    report = tierload.save({"model": compiled, "optimizer": optimizer}, store, step=2)
    assert report.notes == ("state['model']: names without `_orig_mod.` of OptimizedModule",)
    again = tierload.save({"model": nn.DataParallel(model), "optimizer": optimizer}, store, step=3)
    assert again.written_pages == 0, "it is the same state"
    let_go(store)

    shown = CliRunner().invoke(app, ["show", str(store), "--json"])
    keys = {info["key"] for info in json.loads(shown.output)["keys"]}
    assert {"model/embed.weight", "optimizer/state/model~1mix.bias/exp_avg"} <= keys
    TinyLM().load_state_dict(tierload.load(store)["model"])  # strict

    torch.manual_seed(9)
    other = nn.DataParallel(TinyLM())
    fresh = torch.optim.AdamW(other.parameters(), lr=1.0, foreach=False)
    loaded: Any = tierload.load(store, into={"model": other, "optimizer": fresh})
    assert loaded.notes == ("state['model']: names without `module.` of DataParallel",)
    assert_alike(other.module.state_dict(), model.state_dict())
    assert train(other, fresh, 3, seed=1) == train(compiled, optimizer, 3, seed=1)
