"""What the golden stores hold, and a description of it in which every byte counts.

Nothing here may ever change: a golden store was written once, and is compared with what its release put into it.
"""

from __future__ import annotations

import datetime
import hashlib
import pathlib
from typing import Any

import numpy as np
import torch


def pattern(count: int, seed: int) -> torch.Tensor:
    """Bytes from a linear congruence, so that they are the same under every release of torch."""
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(seed * 7919)
    return torch.from_numpy(((numbers * np.uint64(6364136223846793005)) >> np.uint64(56)).astype(np.uint8))


def floats(count: int, seed: int) -> torch.Tensor:
    """Small floats of both signs, as weights have them."""
    return (pattern(count, seed).to(torch.float32) - 127.5) / 1024


def base() -> dict[str, Any]:
    """A state with something of every kind."""
    grid = floats(420, 2).reshape(14, 30)
    dtypes = (torch.bfloat16, torch.complex64)
    return {
        "weight": floats(2600, 1),
        "noise": pattern(3000, 3),
        "zeros": torch.zeros(1500),
        "text": pattern(40, 4).repeat(120),
        "view": grid.t(),
        "tied": [grid, grid[:5]],
        "strided": floats(4 * 3 * 5 * 5, 9).reshape(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(floats(77, 5)),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "dtypes": {str(dtype): pattern(24, 6).view(dtype) for dtype in dtypes} | {"bool": pattern(24, 6) > 99},
        "array": np.arange(12, dtype=">i4").reshape(3, 4),
        "numbers": [0, -1, 2**80, 1.5, float("inf"), -0.0, 3 + 4j, True, None],
        "texts": ["", "né\n", "\U0001f600", "\udc80", "a/b", "x" * 300],
        "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
        "keys": {1: "int", "1": "text", None: "none", (1, "a"): "tuple", False: "bool"},
        "sets": [{1, 2}, frozenset({"a"}), (1, (2,))],
        "time": [datetime.datetime(2026, 11, 30, 1, 2, 3, 4), datetime.timedelta(days=-1, seconds=5)],
        "path": pathlib.Path("a/b"),
        "misc": [torch.Size([2, 3]), torch.float32, slice(1, None, 2), range(3)],
    }


def states() -> dict[str, Any]:
    """The states by name, in the order in which they were saved."""
    first = base()
    second = {**first, "weight": torch.cat([first["weight"][:2048], floats(552, 7)]), "step": 2}
    spike = {"weight": floats(2600, 8), "noise": first["noise"], "step": 3, "nan": float("nan")}
    resumed = {**second, "step": 4, "more": {"layer": [floats(600 + i, 10 + i) for i in range(2)]}}
    return {"first": first, "second": second, "spike": spike, "resumed": resumed}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def describe(value: Any) -> Any:
    """A value as JSON: type, shape, strides and a digest of the bytes, and numbers by their bits."""
    if isinstance(value, torch.Tensor):
        bare = value.detach().resolve_conj().resolve_neg().contiguous()
        raw = bare.view(-1).view(torch.uint8).numpy().tobytes() if bare.numel() else b""
        place = [list(value.shape), list(value.stride()), value.requires_grad]
        return [type(value).__name__, str(value.dtype), *place, digest(raw)]
    if isinstance(value, np.ndarray):
        return ["ndarray", value.dtype.str, list(value.shape), bool(value.flags.f_contiguous), digest(value.tobytes())]
    if isinstance(value, dict):
        return ["dict", *([describe(key), describe(inner)] for key, inner in value.items())]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(describe, value)]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(map(repr, value))]
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, value.hex()]
    return [type(value).__name__, ascii(value)]
