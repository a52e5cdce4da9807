"""A base with adapters: whole in each commit, and paid for once."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import tierload
from tests.hooks.interrupts import Interrupted
from tests.hooks.transformers.training import Fails, llama, losses, make
from tierload.hooks.transformers import export, resume

IDS = torch.arange(8).unsqueeze(0)


def base(width: int = 32) -> Any:
    return llama(hidden_size=width, intermediate_size=4 * width, tie_word_embeddings=False)


def lora(*, width: int = 32, more: str = "", modules_to_save: list[str] | None = None) -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=modules_to_save)
    model = get_peft_model(base(width), config)
    if more:
        model.add_adapter(more, config)
    return model


def test_later_commits_cost_what_the_adapters_do(tmp_path: Path) -> None:
    model = lora(width=256)
    trainer = make(tmp_path, store=tmp_path / "store", parts={"model": model}, max_steps=9)
    resume(trainer)
    whole = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, whole)
    with tierload.open(tmp_path / "store") as store:
        later = [commit.written_bytes for commit in store.commits()[:-1]]
        assert store.commits()[-1].written_bytes > whole.tell() // 2  # it is in the store
    assert len(later) == 2
    assert all(50 * written <= whole.tell() for written in later), (later, whole.tell())


def test_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", store=tmp_path / "whole" / "store", parts={"model": lora()})
    resume(whole)
    with pytest.raises(Interrupted):
        resume(make(tmp_path, store=tmp_path / "store", parts={"model": lora()}, callbacks=(Fails(8),)))
    rest = make(tmp_path, store=tmp_path / "store", parts={"model": lora()})
    resume(rest)
    assert losses(rest) == losses(whole)


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}, {"more": "second"}], ids=str)
def test_adapters_are_exported_as_save_model_writes_them(tmp_path: Path, more: dict[str, Any]) -> None:
    model = lora(**more)
    trainer = make(tmp_path, store=tmp_path / "store", parts={"model": model}, max_steps=3)
    resume(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    export(tmp_path / "store", tmp_path / "exported")
    saved = {path.relative_to(tmp_path / "saved") for path in (tmp_path / "saved").rglob("adapter*")}
    assert saved == {path.relative_to(tmp_path / "exported") for path in (tmp_path / "exported").rglob("adapter*")}
    for path in saved:
        assert (tmp_path / "exported" / path).read_bytes() == (tmp_path / "saved" / path).read_bytes()
    loaded = PeftModel.from_pretrained(base(), str(tmp_path / "exported")).eval()
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)


def test_the_best_adapters_are_loaded(tmp_path: Path) -> None:
    more = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 1.0}
    stock = make(tmp_path / "stock", parts={"model": lora()}, max_steps=9, **more)
    stock.train()
    ours = make(tmp_path, store=tmp_path / "store", parts={"model": lora()}, max_steps=9, **more)
    resume(ours)
    assert ours.state.best_global_step == stock.state.best_global_step < 9
    assert all(map(torch.equal, ours.model.parameters(), stock.model.parameters()))
