"""How many bytes a checkpoint of real float32 weights and AdamW moments takes."""

from __future__ import annotations

import tierload
from bench.measuring import Figure, Result
from bench.versus import bytes_on_disk


def test_bytes(benchmark, scale, folder, keep, trained):
    result = Result(
        "bytes",
        "Bytes of the demonstration's state",
        "The demonstration's GPT (float32 weights and AdamW moments) is trained on the standard library's sources, and "
        "saved after so many steps, with the settings `fast` (the default), `small` and `off`, each into its own "
        "store. Raw are the bytes of all tensors; *written* are segments, *on disk* is what the file system gave, with "
        "manifests and journal. Every page of such a state has changed since the save before.",
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
    result.add(Figure("raw", raw / 1e6, "MB"))
    keep(result)
