"""What commits hold and which ones stay, beside what transformers itself keeps; and failures that are loud."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

import tierload
from tests.hooks.transformers.training import TierTrainer, make
from tierload.engine import writing
from tierload.hooks.transformers import TierloadCallback, resume

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}


def kept(folder: Path) -> set[int]:
    """The steps of transformers' own checkpoints."""
    return {int(re.sub(r"\D", "", path.name)) for path in (folder / "out").glob("checkpoint-*")}


def steps(store: Path) -> set[int | None]:
    with tierload.open(store) as opened:
        return {commit.step for commit in opened.commits()}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"save_total_limit": 2},
        {"save_total_limit": 2, "greater_is_better": True} | BEST,
        {"save_total_limit": 3} | BEST,
        {"save_strategy": "best", "save_total_limit": 2} | BEST,
        {"save_strategy": "epoch", "eval_strategy": "epoch"},
        {"save_strategy": "no"},
    ],
    ids=lambda more: " ".join(f"{name}={value}" for name, value in more.items()) or "usual",
)
def test_saves_and_keeps_what_transformers_does(tmp_path: Path, more: dict[str, Any]) -> None:
    stock = make(tmp_path / "stock", **more)
    stock.train()
    ours = make(tmp_path, store=tmp_path / "store", **more)
    resume(ours)
    assert steps(tmp_path / "store") == kept(tmp_path / "stock")
    assert not kept(tmp_path)
    assert ours.state.best_global_step == stock.state.best_global_step
    assert all(map(torch.equal, ours.model.parameters(), stock.model.parameters()))  # the best, where that is asked for
    if more.get("load_best_model_at_end"):
        with tierload.open(tmp_path / "store") as opened:
            assert opened.find(tag="best").step == stock.state.best_global_step


def test_the_best_is_that_of_the_line_one_goes_on_with(tmp_path: Path) -> None:
    store = tmp_path / "store"
    resume(make(tmp_path, store=store, max_steps=12, learning_rate=1e-3, **BEST))
    with tierload.open(store) as opened:
        assert opened.find(tag="best").step == 12
    trainer = make(tmp_path, store=store, max_steps=10, learning_rate=0.0, lr_scheduler_type="constant", **BEST)
    resume(trainer, step=9)
    with tierload.open(store) as opened:
        assert opened.find(tag="best").step == trainer.state.best_global_step < 12
        assert not opened.find(tag="best").superseded


def test_the_best_is_not_skipped(tmp_path: Path) -> None:
    """However busy the store is, and all that is not skipped is durable in the end."""
    busy = tierload.Settings(on_busy="skip", bandwidth_cap_mbps=0.2)
    trainer = make(tmp_path, callbacks=(TierloadCallback(tmp_path / "store", busy),), max_steps=9, **BEST)
    resume(trainer)
    assert trainer.state.best_global_step == 6  # it is saved right after that of step 3, and before that of step 9
    with tierload.open(tmp_path / "store") as opened:
        assert opened.find(tag="best").step == 6
        assert opened.head().step == 6


def test_without_the_best_the_last_weights_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = writing.save_state

    def fails_at_3(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step < 6:
            raise tierload.StoreIOError(28, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(writing, "save_state", fails_at_3)
    warns = TierloadCallback(tmp_path / "store", tierload.Settings(on_failure="warn"))
    trainer = make(tmp_path, callbacks=(warns,), max_steps=9, greater_is_better=True, **BEST)
    resume(trainer)
    assert trainer.state.best_global_step == 3
    assert "has no commit of step 3, the best one" in caplog.text
    last: Any = tierload.load(tmp_path / "store", step=9, keys="model")
    assert torch.equal(last["model"]["lm_head.weight"], trainer.model.lm_head.weight)


def test_commits_say_what_was_logged(tmp_path: Path) -> None:
    trainer = make(tmp_path, store=tmp_path / "store", max_steps=6)
    resume(trainer)
    last: dict[str, Any] = {}
    for entry in trainer.state.log_history:
        if entry["step"] == 6 and "train_loss" not in entry:
            last |= entry
    with tierload.open(tmp_path / "store") as opened:
        metrics = opened.head().metrics
    assert metrics == {name: value for name, value in last.items() if name != "step"}
    assert {"loss", "eval_loss", "learning_rate", "epoch"} <= metrics.keys()


def test_saves_wait_for_nothing_but_the_first_copy(tmp_path: Path) -> None:
    """The optimizer inside accelerate's is guarded."""
    trainer = make(tmp_path, store=tmp_path / "store", max_steps=3)
    resume(trainer)
    assert tierload.guard(trainer.optimizer.optimizer).reason == ""


def test_the_scale_of_gradients_is_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path, store=tmp_path / "store", max_steps=3)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    resume(trainer)
    again = make(tmp_path, store=tmp_path / "store", max_steps=3)
    again.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    resume(again)
    assert again.accelerator.scaler.get_scale() == trainer.accelerator.scaler.get_scale() == 8.0


def test_the_store_may_be_in_the_output_folder(tmp_path: Path) -> None:
    for steps_in_all in (3, 6):
        trainer = make(tmp_path, store=tmp_path / "out", max_steps=steps_in_all, save_total_limit=1, **BEST)
        resume(trainer)
    assert trainer._initial_global_step == 3
    assert 6 in steps(tmp_path / "out")


def test_models_that_are_not_transformers_are_saved_too(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 8)
            self.head = nn.Linear(8, 64)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.embed(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}

    trainer = make(tmp_path, store=tmp_path / "store", parts={"model": Plain()}, max_steps=3)
    resume(trainer)
    again = make(tmp_path, TierTrainer, store=tmp_path / "store", parts={"model": Plain()}, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert all(map(torch.equal, again.model.parameters(), trainer.model.parameters()))


def test_a_save_that_fails_in_the_background_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise tierload.StoreIOError(28, "No space left on device")

    trainer = make(tmp_path, store=tmp_path / "store", max_steps=3)
    monkeypatch.setattr(writing, "save_state", fails)
    with pytest.raises(tierload.StoreIOError, match="No space left"):
        resume(trainer)


def test_two_runs_do_not_write_to_one_store(tmp_path: Path) -> None:
    """Before anything is trained."""
    store = tierload.Store(tmp_path / "store", mode="w")
    with store, pytest.raises(tierload.StoreBusy):
        resume(make(tmp_path, store=tmp_path / "store"))


def test_pushing_folders_that_are_not_written_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, store=tmp_path / "store")
    trainer.args.push_to_hub = True
    with pytest.raises(tierload.InvalidRequest, match='hub_strategy="every_save"'):
        resume(trainer)


def test_a_release_without_a_method_that_is_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import reload

    from tierload.hooks.transformers import trainer

    monkeypatch.delattr(Trainer, "_load_rng_state")
    with pytest.raises(ImportError, match=r"has no _load_rng_state.*5\.24"):
        reload(trainer)
    assert trainer.TierloadCallback is TierloadCallback


def test_a_method_that_is_not_called_any_more_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            raise AssertionError("not called")

    trainer = make(tmp_path, store=tmp_path / "store")
    trainer.__class__ = Own
    resume(trainer)
    assert "Own._save_checkpoint is not called for commits" in caplog.text
    assert steps(tmp_path / "store")


def test_a_trainer_has_one_store(tmp_path: Path) -> None:
    trainer = make(tmp_path, store=tmp_path / "store")
    trainer.add_callback(TierloadCallback(tmp_path / "other"))
    with pytest.raises(tierload.InvalidRequest, match="2 TierloadCallbacks: give it one"):
        resume(trainer)
