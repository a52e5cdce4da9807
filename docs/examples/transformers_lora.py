"""LoRA: every commit has the base and the adapters, and only the first one pays for the base.

python docs/examples/transformers_lora.py runs/lora
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tierload
from tierload.hooks.transformers import TierloadCallback, export, resume

store = sys.argv[1]
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (64, 16))]
config = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4
)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
args = TrainingArguments(
    f"{store}-out", num_train_epochs=2, save_steps=4, save_total_limit=3, report_to=[], disable_tqdm=True, use_cpu=True
)
resume(Trainer(model=model, args=args, train_dataset=data, callbacks=[TierloadCallback(store)]))

with tierload.open(store) as opened:
    for commit in opened.commits():
        print(f"step {commit.step}: {commit.written_bytes} of {commit.raw_bytes} bytes written")
export(store, f"{store}-adapters")  # what PeftModel.from_pretrained reads
print("the newest adapters are in", f"{store}-adapters")
