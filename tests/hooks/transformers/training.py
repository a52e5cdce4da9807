"""A toy training by transformers' Trainer, in this process or, as a script, in one of its own: ``STORE WAY``, which is
``callback``, ``mixin``, or ``jit`` (a callback, and what transformers does after a SIGTERM)."""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.hooks import interrupts
from tierload.hooks.transformers import TierloadCallback, TierloadMixin, resume

__all__ = ["Fails", "TierTrainer", "Tokens", "arguments", "llama", "losses", "make"]

VOCABULARY = 64


class Tokens(Dataset):
    """Samples that are drawn anew each time if ``augment``, by the global generators; else always the same."""

    def __init__(self, augment: bool = True) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        ids = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        if self.augment:
            ids = torch.where(torch.rand(8) < 0.1, torch.full_like(ids, random.randrange(VOCABULARY)), ids)
            ids = ids.roll(np.random.randint(8))
        return {"input_ids": ids, "labels": ids}


class TierTrainer(TierloadMixin, Trainer):
    pass


class Told(TrainerCallback):
    """Tells each loss, and ends the script where a test wants it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            interrupts.tell(state.global_step, logs["loss"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        interrupts.maybe_end(state.global_step)


class Fails(TrainerCallback):
    """Fails at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise interrupts.Interrupted(f"in step {self.step}")


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    usual: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_dropout": 0.2,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**(usual | more)))


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """30 steps in 3 epochs of 10; saved and evaluated every third."""
    usual: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "log_level": "error",
    }
    return TrainingArguments(**(usual | more))


def make(
    folder: Path,
    cls: type[Trainer] = Trainer,
    *,
    store: Path | None = None,
    callbacks: tuple[Any, ...] = (),
    augment: bool = True,
    parts: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A trainer that saves into ``store``, or as transformers does. ``parts`` are of ``Trainer``, ``more`` of its
    arguments."""
    given: dict[str, Any] = {"model": llama(), "train_dataset": Tokens(augment), "eval_dataset": Tokens(augment)}
    every = [*callbacks, *([TierloadCallback(store)] if store else [])]
    return cls(args=arguments(folder, **more), callbacks=every, **(given | (parts or {})))


def losses(trainer: Any) -> dict[int, str]:
    """The losses of a training by step, those before it was resumed too."""
    return {entry["step"]: entry["loss"].hex() for entry in trainer.state.log_history if "loss" in entry}


def main() -> None:
    warnings.simplefilter("ignore")
    store, way = Path(sys.argv[1]), sys.argv[2]
    interrupts.die_in_save()
    cls = TierTrainer if way == "mixin" else Trainer
    trainer = make(store.parent, cls, store=store, callbacks=(Told(),), enable_jit_checkpoint=way == "jit")
    if way == "jit":
        manager = next(each for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager")).jit_manager
        manager.kill_wait = 0  # seconds
    if way == "mixin":
        trainer.train(resume_from_checkpoint=store.exists())
    else:
        resume(trainer)


if __name__ == "__main__":
    main()
