"""A plain training loop that can be stopped at any time, by anything, and started again: it goes on where it was.

python docs/examples/plain_loop.py runs/plain --steps 2000     # Ctrl-C, kill, kill -9; then the same again
tierload log runs/plain
tierload rollback runs/plain --steps 2                         # and again
"""

from __future__ import annotations

import argparse

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

import tierload


def main() -> None:
    """Fits a sine, with all that a real run has."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("store")
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--every", type=int, default=100)
    given = options.parse_args()

    x = torch.linspace(-3, 3, 4096)[:, None]
    data = torch.utils.data.TensorDataset(x, x.sin())
    loader = StatefulDataLoader(data, batch_size=64, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)

    parts = {"model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with tierload.Session(given.store, every=given.every, keep=3, keep_best="loss:min", **parts) as run:
        print(f"resumed from step {run.resumed.step}" if run.resumed else "a new run")
        batches = run.batches(loader)
        for step in run.steps(given.steps):
            inputs, targets = next(batches)
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            run.log(loss=loss, lr=optimizer.param_groups[0]["lr"], epoch=batches.epoch)
            if step % given.every == 0:
                print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
