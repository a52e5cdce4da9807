"""Exports of commits against what ``save_model`` writes: bit for bit, and read by ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    default_data_collator,
)

import tierload
from tests.hooks.transformers.training import VOCABULARY, llama, make
from tierload.hooks.transformers import export, resume

IDS = torch.arange(8).unsqueeze(0)


class Collator:
    """Holds the tokenizer, which the trainer is not given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: list[Any]) -> Any:
        return default_data_collator(features)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY - 1)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    made.add_tokens(["<added>"])
    return made


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=16, n_layer=1, n_head=2))


def experts() -> MixtralForCausalLM:
    """Whose weights have other names and shapes in files."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads))


def halves() -> Any:
    model = llama(tie_word_embeddings=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize("model", [llama, halves, gpt2, experts])
def test_b44_b83_b95_is_what_save_model_writes(tmp_path: Path, model: Any) -> None:
    parts = {"model": model(), "data_collator": Collator(tokenizer())}
    trainer = make(tmp_path, store=tmp_path / "store", max_steps=3, parts=parts, seed=1)
    resume(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    commit = export(tmp_path / "store", tmp_path / "exported")
    assert commit.step == 3
    saved, exported = ({path.name: path for path in (tmp_path / name).iterdir()} for name in ("saved", "exported"))
    assert exported.keys() - {"training_args.json"} == saved.keys() - {"training_args.bin"}
    for name in saved.keys() & exported.keys():
        assert exported[name].read_bytes() == saved[name].read_bytes(), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    # buffers that no file has, such as the rotary ones, are computed and not left as memory was
    assert torch.equal(loaded(IDS).logits, trainer.model.eval()(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").convert_tokens_to_ids("<added>") == VOCABULARY - 1


def test_any_commit_into_a_new_folder(tmp_path: Path) -> None:
    resume(make(tmp_path, store=tmp_path / "store", max_steps=6))
    with tierload.open(tmp_path / "store", mode="w") as store:
        store.tag("first", 3)
    assert export(tmp_path / "store", tmp_path / "a" / "b", tag="first").step == 3
    state: Any = tierload.load(tmp_path / "store", step=3, keys="model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "b").state_dict()
    assert all(torch.equal(state["model"][name], value) for name, value in loaded.items())
    with pytest.raises(tierload.InvalidRequest, match="not an empty folder"):
        export(tmp_path / "store", tmp_path / "a")
    with pytest.raises(tierload.CommitNotFound):
        export(tmp_path / "store", tmp_path / "c", step=4)
    assert not (tmp_path / "c").exists()


def test_weights_that_a_trainer_writes_by_itself_are_not_those_of_another_step(tmp_path: Path) -> None:
    class Heads(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            assert output_dir is not None
            torch.save(self.model.lm_head.state_dict(), Path(output_dir) / "head.pt")
            (Path(output_dir) / "labels.txt").write_text("a")

    resume(make(tmp_path, Heads, store=tmp_path / "store", max_steps=6))
    export(tmp_path / "store", tmp_path / "exported")
    assert (tmp_path / "exported" / "labels.txt").read_text() == "a"
    assert not (tmp_path / "exported" / "head.pt").exists()


def test_a_model_that_transformers_has_no_class_for_keeps_its_names(tmp_path: Path) -> None:
    class OwnConfig(LlamaConfig):
        model_type = "own"

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    model = Own(OwnConfig(**llama().config.to_diff_dict()))
    trainer = make(tmp_path, store=tmp_path / "store", parts={"model": model}, max_steps=1)
    resume(trainer)
    export(tmp_path / "store", tmp_path / "exported")
    loaded = Own.from_pretrained(tmp_path / "exported").eval()
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
