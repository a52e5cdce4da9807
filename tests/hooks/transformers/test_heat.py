"""A trainer with a heat meter: its commits have the heat of the model, and a resumed training goes on from it."""

from __future__ import annotations

from pathlib import Path

import tierload
from tests.hooks.transformers.training import make
from tierload.heat import HeatMeter
from tierload.hooks.transformers import TierloadCallback, resume


def train(folder: Path, *, heat: bool, step: int | None = None) -> HeatMeter | None:
    callback = TierloadCallback(folder / "store", heat=heat)
    resume(make(folder, callbacks=(callback,), max_steps=6, eval_strategy="no"), step=step)
    return callback.meter


def test_a_resumed_training_goes_on_with_what_was_measured(tmp_path: Path) -> None:
    meter = train(tmp_path, heat=True)
    assert meter is not None
    with tierload.open(tmp_path / "store") as store:
        table = store.heat()
    assert table is not None
    assert "model/lm_head.weight" in table.keys, "and of the embedding, which is tied to it"
    again = train(tmp_path, heat=True, step=3)
    assert again is not None
    assert again.scores() == meter.scores()
    assert train(tmp_path, heat=False, step=3) is None
    with tierload.open(tmp_path / "store") as store:
        assert store.heat() is None
