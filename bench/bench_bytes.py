"""How many bytes a checkpoint of real float32 weights and AdamW moments takes."""

from __future__ import annotations

import numpy as np
import torch

import tierload
from bench.measuring import Figure, Result
from bench.train import Run
from bench.versus import bytes_on_disk

_PAGE_ITEMS = 1 << 18


def test_bytes(benchmark, scale, folder, keep, trained):
    result = Result(
        "bytes",
        "Bytes of the demonstration's state",
        "The demonstration's GPT (float32 weights and AdamW moments) is trained on the standard library's sources, and "
        "saved after so many steps, with the settings `fast` (the default), `small` and `off`, each into its own "
        "store. Raw are the bytes of all tensors; *written* are segments, *on disk* is what the file system gave, with "
        "manifests and journal. *Entropy* is the order-0 entropy of each byte plane of each MiB, the sign moved as in "
        "docs/FORMAT.md section 7: what a code without context could reach. No page of such a state is as it was.",
        folder,
    )
    reports = {}

    def train_and_save() -> None:
        for step in (scale.of(100, 3), scale.of(200, 4)):
            while trained.steps < step:
                trained.step()
            for setting in ("fast", "small", "off"):
                path = folder / setting
                before = bytes_on_disk(path) if path.exists() else 0
                with tierload.Store(path, mode="w", settings=tierload.Settings(compression=setting)) as store:
                    report = store.save(trained.state, step=step)
                reports[step, setting] = (report, bytes_on_disk(path) - before)

    benchmark.pedantic(train_and_save, rounds=1)
    for (step, setting), (report, disk) in reports.items():
        raw = report.raw_bytes
        limit = 0.83 if setting == "fast" else None
        result.add(Figure(f"written ÷ raw, step {step}, `{setting}`", report.written_bytes / raw, "", limit=limit))
        result.add(Figure(f"on disk ÷ raw, step {step}, `{setting}`", disk / raw, ""))
    for what, tensors in _parts(trained).items():
        bits = [_entropy_bits(tensor) for tensor in tensors]
        total = sum(tensor.nbytes for tensor in tensors)
        result.add(Figure(f"entropy ÷ raw at the end, {what}", sum(bits) / 8 / total, "", note=f"{total / 1e6:.1f} MB"))
    result.add(Figure("raw", raw / 1e6, "MB"))
    keep(result)


def _parts(run: Run) -> dict[str, list[torch.Tensor]]:
    moments = list(run.optimizer.state_dict()["state"].values())
    return {
        "weights": [parameter.detach() for parameter in run.model.parameters()],
        "first moments": [each["exp_avg"] for each in moments],
        "second moments": [each["exp_avg_sq"] for each in moments],
    }


def _entropy_bits(tensor: torch.Tensor) -> float:
    items = tensor.numpy().reshape(-1).view(np.uint32)
    total = 0.0
    for start in range(0, items.size, _PAGE_ITEMS):
        page = items[start : start + _PAGE_ITEMS]
        upper = page >> 16
        upper = (upper << 1 | upper >> 15) & 0xFFFF
        for plane in (upper >> 8, upper & 0xFF, page >> 8 & 0xFF, page & 0xFF):
            shares = np.bincount(plane, minlength=256) / page.size
            shares = shares[shares > 0]
            total -= page.size * float((shares * np.log2(shares)).sum())
    return total
