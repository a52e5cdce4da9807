"""transformers' Trainer: its own checkpoints and tierload's commits, of a whole model and of LoRA."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import tierload
from bench.measuring import Figure, Result, fsync_folder, median, ratios
from tierload.hooks.transformers import TierloadCallback, resume

_HOW = (
    "A Llama of {millions:.0f} million parameters with AdamW, trained on random tokens on the CPU, saved after every "
    "second step. `wait` is how long a save holds the loop up: the call, and what the optimizer's step waits. "
    "`durable` is until it would survive a power cut; of transformers' checkpoints, which are not flushed, with an "
    "fsync of every file. One run after the other in one process, {rounds} times."
)


class _Timed(Trainer):
    """Transformers' own saving, timed. Its bytes and files are counted before they are removed."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.waits: list[float] = []
        self.durable: list[float] = []
        self.bytes: list[int] = []
        self.files: list[int] = []

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        start = time.perf_counter()
        super()._save_checkpoint(model, trial)
        self.waits.append(time.perf_counter() - start)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in (*files, folder):
            fsync_folder(path)  # or a file
        self.durable.append(time.perf_counter() - start)
        sizes = [path.stat().st_size for path in files]
        self.bytes.append(sum(sizes))
        self.files.append(len(sizes))
        shutil.rmtree(folder)


class _Pending(TrainerCallback):
    """Keeps the handle of every save."""

    def __init__(self, keeper: TierloadCallback) -> None:
        self.keeper = keeper
        self.pending: list[tierload.PendingSave] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.keeper.pending is not None
        self.pending.append(self.keeper.pending)


def _model(width: int, layers: int, lora: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16 * width,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8)) if lora else model


def _parts(folder: Path, model: Any, saves: int) -> dict[str, Any]:
    tokens = torch.randint(0, model.config.vocab_size, (4 * saves, 32))
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        max_steps=2 * saves,
        save_steps=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return {"model": model, "args": args, "train_dataset": [{"input_ids": ids, "labels": ids} for ids in tokens]}


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_saves(benchmark, scale, folder, keep, lora):
    width, layers, saves, rounds = scale.of(512, 32), scale.of(8, 1), scale.of(6, 3), scale.of(3, 1)
    samples: dict[str, list[float]] = {}
    last: dict[str, float] = {}

    def note(name: str, values: list[Any]) -> None:
        samples.setdefault(name, []).extend(values[1:])  # the first one has memory to touch, or pays for a base

    def one_round() -> None:
        stock = _Timed(**_parts(folder / "stock", _model(width, layers, lora), saves))
        stock.train()
        store = folder / "store"
        keeper = TierloadCallback(store)
        saved = _Pending(keeper)
        ours = Trainer(**_parts(folder / "out", _model(width, layers, lora), saves), callbacks=[keeper, saved])
        resume(ours)
        reports = [pending.result() for pending in saved.pending]
        note("transformers: wait", stock.waits)
        note("tierload: wait", [report.waited_seconds for report in reports])
        note("transformers: durable", stock.durable)
        note("tierload: durable", [report.seconds for report in reports])
        note("transformers: bytes", stock.bytes)
        note("tierload: bytes", [report.written_bytes for report in reports])
        state = {"model": ours.model.state_dict(), "optimizer": ours.optimizer.state_dict()}
        torch.save(state, folder / "whole.pt")
        last["torch.save of the whole state: bytes"] = (folder / "whole.pt").stat().st_size
        last["transformers: files of a checkpoint"] = stock.files[-1]
        last["tierload: files of all commits"] = sum(path.is_file() for path in store.rglob("*"))
        last["parameters"] = sum(parameter.numel() for parameter in ours.model.parameters())
        tierload.open(store, mode="w").close()
        shutil.rmtree(store)

    benchmark.pedantic(one_round, rounds=rounds)
    title = f"transformers' Trainer, {'LoRA' if lora else 'a whole model'}: its checkpoints and tierload's commits"
    how = _HOW.format(millions=last.pop("parameters") / 1e6, rounds=rounds)
    result = Result(f"hook-transformers-{'lora' if lora else 'whole'}", title, how, folder)
    result.samples = samples
    for name, values in samples.items():
        if name.endswith("bytes"):
            result.add(Figure.of(name, [value / 1e6 for value in values], "MB"))
        else:
            result.add(Figure.of(name, [value * 1e3 for value in values], "ms"))
    result.add(Figure.of("wait, tierload ÷ transformers", ratios(*_two(samples, "wait")), ""))
    whole = last["torch.save of the whole state: bytes"]
    share = median(samples["tierload: bytes"]) / whole
    result.add(Figure("bytes, tierload ÷ torch.save of the whole", share, "", limit=1 / 50 if lora else None))
    for name, value in last.items():
        result.add(Figure(name, value / 1e6, "MB") if name.endswith("bytes") else Figure(name, value, ""))
    keep(result)


def _two(samples: dict[str, list[float]], what: str) -> tuple[list[float], list[float]]:
    return samples[f"tierload: {what}"], samples[f"transformers: {what}"]
