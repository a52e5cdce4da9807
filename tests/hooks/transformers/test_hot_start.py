"""A trainer that begins while its weights arrive: its losses are those of a run that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tierload
from tests.hooks.transformers.test_resuming import interrupted
from tests.hooks.transformers.training import TierTrainer, losses, make
from tests.hot.starts import held
from tierload.hooks.transformers import TierloadCallback, resume


def test_b84_the_losses_are_those_of_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short: dict[str, Any] = {"max_steps": 12, "eval_strategy": "no"}
    whole = make(tmp_path / "whole", store=tmp_path / "whole" / "store", **short)
    resume(whole)
    store = interrupted(tmp_path, 8, **short)
    callback = TierloadCallback(store, hot_start=True)
    rest = make(tmp_path, TierTrainer, callbacks=(callback,), **short)
    get_batch_samples = rest.get_batch_samples
    with held(monkeypatch) as go:

        def first(*args: object, **kwargs: object) -> object:
            found = get_batch_samples(*args, **kwargs)
            assert callback.hot_start is not None
            assert go.is_set() or callback.hot_start.progress.tensors == 0, "the first batches do not wait"
            go.set()
            return found

        rest.get_batch_samples = first
        rest.train(resume_from_checkpoint=True)
    assert callback.hot_start is not None
    assert callback.hot_start.ready
    assert losses(rest) == losses(whole)
    ours, theirs = (tierload.load(path, keys=["model", "optimizer"]) for path in (store, tmp_path / "whole" / "store"))
    assert str(ours) == str(theirs)


def test_resume_has_it_by_the_same_name(tmp_path: Path) -> None:
    store = interrupted(tmp_path, 4)
    callback = TierloadCallback(store)
    resume(make(tmp_path, callbacks=(callback,), max_steps=6), hot_start=True)
    assert callback.hot_start is not None
    assert callback.hot_start.commit.step == 3
