"""What the tests of other formats share."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from tests.cases.stores import let_go
from tierload import ConvertReport, Store, export_state
from tierload.state.dtypes import BY_NAME


def export(state: object, to: Path, **options: Any) -> ConvertReport:
    """Saves a state into a store beside ``to``, and exports it."""
    path = to.parent / f"{to.name}.store"
    with Store(path, mode="w") as store:
        store.save(state)
    return export_state(path, to, **options)


def filled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a dtype with bytes that tell its elements apart."""
    row = BY_NAME[name]
    tensor = torch.empty(shape, dtype=row.torch)
    count = tensor.numel() * row.size
    pattern = torch.arange(count, dtype=torch.int64).mul(37).remainder(2 if name == "bool" else 251).to(torch.uint8)
    if count:
        tensor.untyped_storage().copy_(pattern.untyped_storage())
    return tensor


def raw_file(path: Path, header: dict[str, Any] | bytes, data: bytes, *, length: int | None = None) -> Path:
    """A safetensors file made by hand; ``length`` is what it says of its header."""
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def names(folder: Path) -> list[str]:
    """What is in a folder, without the stores."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith("store"))


def no_commit(store: Path) -> bool:
    """Whether an import left no store, or one as it was."""
    let_go(store.parent)
    return not store.exists()
