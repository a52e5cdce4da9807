"""A model that answers while it is still arriving: python docs/examples/hot_start.py runs/model"""

import sys

import torch

import tierload

with torch.device("meta"):  # no memory yet, and nothing is initialised for nothing
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
boot = tierload.hot_start(sys.argv[1], model)
print("\n".join(map(str, boot.stages)))
print(f"the output: {model(torch.ones(1, 256)).sum().item():.6f}")  # each layer waits for its own tensors alone
report = boot.join()  # everything is there: raises what is damaged
print(f"{len(report.loaded)} tensors, of which uses waited {boot.progress.stalled_seconds * 1e3:.1f} ms")
