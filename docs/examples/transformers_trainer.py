"""A Trainer that can be killed at any time: run it again, and it goes on.

python docs/examples/transformers_trainer.py runs/llama
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tierload
from tierload.hooks.transformers import TierloadCallback, export, resume

store = sys.argv[1]
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (64, 16))]
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
args = TrainingArguments(
    f"{store}-out", num_train_epochs=3, save_steps=4, logging_steps=4, report_to=[], disable_tqdm=True, use_cpu=True
)
trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=data, callbacks=[TierloadCallback(store)])
resume(trainer)  # from the newest commit; from the beginning where there is none

with tierload.open(store) as opened:
    for commit in opened.commits():
        print(f"step {commit.step}: {commit.written_bytes} bytes written, loss {commit.metrics['loss']:.3f}")
export(store, f"{store}-model", step=4)  # what LlamaForCausalLM.from_pretrained reads
print("the model of step 4 is in", f"{store}-model")
