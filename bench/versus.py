"""The demonstration's act of costs: the same state saved by tierload and by ``torch.save``, in turn, on one disk."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import tierload
from bench.train import Run, deterministic

__all__ = ["bytes_on_disk", "torch_save_durably"]


def bytes_on_disk(path: Path) -> int:
    """What the file system gives to a file or a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_blocks * 512 for each in files)


def torch_save_durably(state: object, path: Path) -> None:
    """``torch.save`` that would survive a power cut: a new file, synced under a temporary name, renamed, folder synced.

    Without that a crash can leave a torn file under the name of the newest checkpoint.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--folder", required=True, help="for the files of torch.save")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    deterministic(seed=0)
    run = Run()
    tierload.load(options.store, into=run.state)
    folder, store = Path(options.folder), Path(options.store)
    folder.mkdir(exist_ok=True)
    rows: dict[str, list[tuple[float, int]]] = {"torch": [], "tierload": [], "again": []}
    raw = 0

    def with_torch() -> None:
        path = folder / f"step-{run.steps}.pt"
        start = time.perf_counter()
        torch_save_durably(run.plain(), path)
        rows["torch"].append((time.perf_counter() - start, bytes_on_disk(path)))

    def with_tierload(row: str = "tierload") -> None:
        nonlocal raw
        before = bytes_on_disk(store)
        start = time.perf_counter()
        report = tierload.save(run.state, store, step=run.steps)
        rows[row].append((time.perf_counter() - start, bytes_on_disk(store) - before))
        raw = report.raw_bytes

    for number in range(options.rounds + 1):
        run.step()  # so that nothing is equal to what was saved before
        for save in (with_torch, with_tierload) if number % 2 else (with_tierload, with_torch):
            save()
        with_tierload("again")
    # The first of each opens files and touches memory for the first time.
    print(json.dumps({"raw": raw, "rows": {name: measured[1:] for name, measured in rows.items()}}))


if __name__ == "__main__":
    main()
