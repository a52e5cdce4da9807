"""What a resumed training goes on with, and what it refuses. transformers' own way of it runs beside."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import tierload
from tests.hooks.interrupts import Interrupted
from tests.hooks.transformers.training import Fails, TierTrainer, llama, losses, make
from tierload.hooks.transformers import TierloadCallback, resume


def interrupted(folder: Path, step: int, **more: Any) -> Path:
    """A store in which a training got so far."""
    trainer = make(folder, store=folder / "store", callbacks=(Fails(step),), **more)
    with pytest.raises(Interrupted):
        resume(trainer)
    return folder / "store"


@pytest.mark.parametrize(
    ("step", "more"),
    [
        (8, {}),
        (8, {"gradient_accumulation_steps": 1, "max_steps": 30}),
        (17, {"train_sampling_strategy": "group_by_length"}),  # shuffles by the global generators, as an epoch begins
        (17, {"accelerator_config": {"use_seedable_sampler": False}}),
        (14, {"save_strategy": "epoch"}),
        (10, {"save_steps": 1}),  # from the last commit but one of an epoch: a single batch is left
        (11, {"save_steps": 1}),  # from the end of an epoch
        (14, {"save_steps": 1, "per_device_train_batch_size": 3}),  # whose last step has fewer batches
    ],
)
def test_b84_batches_and_dropout_are_those_of_a_whole_run(tmp_path: Path, more: dict[str, Any], step: int) -> None:
    whole = make(tmp_path / "whole", store=tmp_path / "whole" / "store", **more)
    resume(whole)
    store = interrupted(tmp_path, step, **more)
    rest = make(tmp_path, store=store, **more)
    resume(rest)
    assert losses(rest) == losses(whole)
    assert rest.state.log_history[-1]["step"] == whole.state.max_steps


class Peeks(TrainerCallback):
    """Looks at samples while its trainer trains."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        next(iter(self.trainer.get_train_dataloader()))


def test_other_loaders_may_be_made_meanwhile(tmp_path: Path) -> None:
    def resumed(folder: Path, *callbacks: TrainerCallback, **more: Any) -> Any:
        peeks = Peeks()
        peeks.trainer = make(folder, store=folder / "store", callbacks=(peeks, *callbacks), **more)
        resume(peeks.trainer)
        return peeks.trainer

    whole = resumed(tmp_path / "whole")
    with pytest.raises(Interrupted):
        resumed(tmp_path, Fails(8))
    assert losses(resumed(tmp_path)) == losses(whole)


def test_is_transformers_own_run_where_that_can_go_on(tmp_path: Path) -> None:
    """Samples that are not drawn at random: its own checkpoints are exact, too, and all three runs are the same."""
    stock = make(tmp_path / "stock", callbacks=(Fails(8),), augment=False)
    with pytest.raises(Interrupted):
        stock.train()
    stock = make(tmp_path / "stock", augment=False)
    stock.train(resume_from_checkpoint=True)
    store = interrupted(tmp_path, 8, augment=False)
    ours = make(tmp_path, TierTrainer, store=store, augment=False)
    ours.train(resume_from_checkpoint=True)
    assert losses(ours) == losses(stock)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_workers_draw_the_same_samples(tmp_path: Path) -> None:
    """In the same order; what they draw at random is documented to differ."""
    more = {"augment": False, "dataloader_num_workers": 2, "eval_strategy": "no", "max_steps": 20}
    whole = make(tmp_path / "whole", store=tmp_path / "whole" / "store", **more)
    resume(whole)
    rest = make(tmp_path, store=interrupted(tmp_path, 17, **more), **more)
    resume(rest)
    assert losses(rest) == losses(whole)


def test_skips_no_data_where_that_is_asked_for(tmp_path: Path) -> None:
    stock = make(tmp_path / "stock", callbacks=(Fails(8),))
    with pytest.raises(Interrupted):
        stock.train()
    stock = make(tmp_path / "stock", ignore_data_skip=True)
    stock.train(resume_from_checkpoint=True)
    ours = make(tmp_path, store=interrupted(tmp_path, 8), ignore_data_skip=True)
    resume(ours)
    assert losses(ours) == losses(stock)


def test_a_save_before_the_end_of_a_step_is_of_its_beginning(tmp_path: Path) -> None:
    """As transformers does it after a SIGTERM (enable_jit_checkpoint)."""
    handler = signal.getsignal(signal.SIGTERM)

    class Asks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 7:
                trainer._save_checkpoint(trainer.model, trial=None)
                raise Interrupted

    whole = make(tmp_path / "whole", store=tmp_path / "whole" / "store")
    resume(whole)
    trainer = make(tmp_path, store=tmp_path / "store", callbacks=(Asks(),), enable_jit_checkpoint=True)
    with pytest.raises(Interrupted):
        resume(trainer)
    signal.signal(signal.SIGTERM, handler)  # transformers' own
    rest = make(tmp_path, store=tmp_path / "store")
    resume(rest)
    assert losses(rest) == losses(whole)
    with tierload.open(tmp_path / "store") as store:
        assert [commit.step for commit in store.commits()][-3:] == [7, 6, 3]


def test_changes_over_from_checkpoints_of_transformers_own(tmp_path: Path) -> None:
    whole = make(tmp_path / "stock", augment=False)
    whole.train()
    ours = make(tmp_path, TierTrainer, store=tmp_path / "store", augment=False)
    ours.train(resume_from_checkpoint=str(tmp_path / "stock" / "out" / "checkpoint-9"))
    assert losses(ours) == losses(whole)
    with tierload.open(tmp_path / "store") as store:
        assert store.commits()[-1].step == 12


@pytest.mark.parametrize(
    ("which", "step"), [(True, 6), (3, 3), ("first", 3), ("path", 6), ("id", 3), (None, 0), (False, 0)]
)
def test_which_commit_is_meant(tmp_path: Path, which: Any, step: int) -> None:
    store = interrupted(tmp_path, 8)
    with tierload.open(store, mode="w") as opened:
        opened.tag("first", 3)
        which = {"path": str(store), "id": opened.find(step=3).id}.get(which, which)
    trainer = make(tmp_path, TierTrainer, store=store, max_steps=step + 1)
    trainer.train(resume_from_checkpoint=which)
    assert trainer._initial_global_step == step
    with tierload.open(store) as opened:
        assert opened.head().step == step + 1
        superseded = [commit.step for commit in opened.commits() if commit.superseded]
        assert superseded == ([6] if step == 3 else [])  # what one does not go on from is left behind, and stays


def test_begins_anew_where_there_is_nothing_and_says_where_there_is(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(tierload.StoreNotFound):
        make(tmp_path, TierTrainer, store=tmp_path / "store").train(resume_from_checkpoint=True)
    assert not (tmp_path / "store").exists()
    with pytest.raises(tierload.StoreNotFound):
        resume(make(tmp_path, store=tmp_path / "store"), step=3)
    resume(make(tmp_path, store=tmp_path / "store", max_steps=3))
    make(tmp_path, TierTrainer, store=tmp_path / "store", max_steps=3).train()
    assert "has commits up to step 3, and training begins anew" in caplog.text


def test_callbacks_go_on_with_what_they_had_counted(tmp_path: Path) -> None:
    more = {"restore_callback_states_from_checkpoint": True, "metric_for_best_model": "loss", "eval_steps": 1}
    more |= {"load_best_model_at_end": True, "save_steps": 1, "greater_is_better": True}  # the first stays the best

    def patient() -> EarlyStoppingCallback:
        return EarlyStoppingCallback(early_stopping_patience=8)

    store = tmp_path / "store"
    trainer = make(tmp_path, store=store, callbacks=(patient(), Fails(6)), **more)
    with pytest.raises(Interrupted):
        resume(trainer)
    whole = make(tmp_path / "whole", store=tmp_path / "whole" / "store", callbacks=(patient(),), **more)
    resume(whole)
    rest = make(tmp_path, store=store, callbacks=(patient(),), **more)
    resume(rest)
    assert rest.state.global_step == whole.state.global_step < whole.state.max_steps
    assert rest.state.best_global_step == whole.state.best_global_step


def test_b95_a_commit_that_lacks_something_says_what(tmp_path: Path) -> None:
    store = tmp_path / "store"
    resume(make(tmp_path, store=store, save_only_model=True, max_steps=3))
    trainer = make(tmp_path, store=store)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(tierload.InvalidRequest, match=r"step 3\), for it has no rng, batches, scheduler: it was saved"):
        resume(trainer)
    state: Any = tierload.load(store)
    tierload.save({"trainer_state": state["trainer_state"], "rng": {}, "batches": None, "scheduler": {}}, store)
    with pytest.raises(tierload.KeyMismatch, match="optimizer: is in the target and not in the store"):
        resume(trainer)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert tierload.load(store, step=3, keys="model", into={"model": trainer.model})


def test_b81_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    store = interrupted(tmp_path, 4)
    trainer = make(tmp_path, store=store, parts={"model": llama(intermediate_size=16, num_hidden_layers=3)})
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(tierload.KeyMismatch) as caught:
        resume(trainer)
    assert any("layers.2" in key for key in caught.value.missing)
    assert any(key.endswith("mlp.up_proj.weight") for key in caught.value.shapes)
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_trainer_that_would_not_save_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(tierload.InvalidRequest, match=r"resume\(trainer\)"):
        make(tmp_path, store=tmp_path / "store").train()
    with pytest.raises(tierload.InvalidRequest, match="TierloadCallback"):
        resume(make(tmp_path))
    with pytest.raises(tierload.InvalidRequest, match="hyperparameters"):
        make(tmp_path, TierTrainer, store=tmp_path / "store").train(trial={"learning_rate": 1})


def test_an_error_that_is_caught_leaves_no_save_under_way(tmp_path: Path) -> None:
    """Else one would go on from the commit before."""

    class Saved(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise Interrupted

    slow = tierload.Settings(bandwidth_cap_mbps=0.5)
    trainer = make(tmp_path, callbacks=(TierloadCallback(tmp_path / "store", slow), Saved()))
    with pytest.raises(Interrupted):
        resume(trainer)
    again = make(tmp_path, store=tmp_path / "store", max_steps=4)
    resume(again)
    assert again._initial_global_step == 3


def test_a_log_may_have_what_is_not_for_json(tmp_path: Path) -> None:
    class Logs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            log = {
                "a": np.float32(1.5),
                "b": torch.tensor(2.0),
                "each": np.arange(2),
                "of": {3, 4},
                "at": tmp_path,
            }
            state.log_history.append(log | {"step": state.global_step})

    resume(make(tmp_path, store=tmp_path / "store", max_steps=3, callbacks=(Logs(),)))
    trainer = make(tmp_path, store=tmp_path / "store", max_steps=4)
    resume(trainer)
    first = trainer.state.log_history[0]
    assert first.pop("each").tolist() == [0, 1]
    assert first == {"a": 1.5, "b": 2.0, "of": {3, 4}, "at": tmp_path, "step": 1}
    with tierload.open(tmp_path / "store") as store:
        assert "a" not in store.head().metrics  # which are of what was logged since


def test_b45_ties_stay_tied(tmp_path: Path) -> None:
    trainer = make(tmp_path, store=interrupted(tmp_path, 8))
    resume(trainer)
    model = trainer.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(trainer.optimizer.param_groups[0]["params"]) + len(trainer.optimizer.param_groups[1]["params"]) == len(
        list(model.named_parameters())
    )


def test_an_own_trainer_keeps_what_it_does(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.computed = True
            return super().compute_loss(*args, **kwargs)

    trainer = make(tmp_path, Own, store=tmp_path / "store", max_steps=1)
    resume(trainer)
    assert isinstance(trainer, Own)
    assert trainer.computed
    assert isinstance(trainer.callback_handler.callbacks[-2], TierloadCallback)
