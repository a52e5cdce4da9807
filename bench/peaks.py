"""One process that saves or loads a state, and prints by how many bytes its memory grew at the most."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import tierload
from bench.versus import torch_save_durably

__all__ = ["KINDS"]

# Each is run in this order on one folder: the loads read what the saves have written.
KINDS = ["tierload.save", "torch.save", "tierload.save of views", "tierload.load", "torch.load", "tierload.load into"]
_TENSORS = 64


def make(nbytes: int, *, views: bool) -> dict[str, torch.Tensor]:
    """Tensors of different numbers, ``nbytes`` in all; ``views`` are the left halves of rows twice as long."""
    rows = nbytes // _TENSORS // 4 // 1024
    base = torch.randn(rows, 2048 if views else 1024, generator=torch.Generator().manual_seed(0))
    made = {f"layer.{n}": base * (1 + n / 100) for n in range(_TENSORS)}
    return {name: tensor[:, :1024] for name, tensor in made.items()} if views else made


def growth(action: Callable[[], object]) -> int:
    """Highest resident memory during ``action``, less that before it. What it returns is alive at the end of it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    result = action()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def main() -> None:
    folder, nbytes, kinds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    # Imports, threads and the store itself are not what is measured.
    tierload.save({"w": torch.zeros(64)}, folder / "other")
    tierload.load(folder / "other")
    print(json.dumps({kind: growth(action_of(kind, folder, nbytes)) for kind in kinds}))


def action_of(kind: str, folder: Path, nbytes: int) -> Callable[[], object]:
    store, file = folder / "store", folder / "file.pt"
    if kind in ("tierload.load", "torch.load"):
        return {"tierload.load": lambda: tierload.load(store), "torch.load": lambda: torch.load(file)}[kind]
    state = make(nbytes, views=kind.endswith("views"))
    return {
        "tierload.save": lambda: tierload.save(state, store),
        "torch.save": lambda: torch_save_durably(state, file),
        "tierload.save of views": lambda: tierload.save(state, folder / "views"),
        "tierload.load into": lambda: tierload.load(store, into=state),
    }[kind]


if __name__ == "__main__":
    main()
