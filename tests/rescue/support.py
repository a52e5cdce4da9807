"""What the tests of tierload.rescue share: some tensors, small commits, and a look at what was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from tests.rescue.builder import Builder, array, tensor
from tierload import rescue
from tierload.rescue.manifest import Tensor

RNG = np.random.default_rng(7)
WEIGHT = RNG.standard_normal((300, 200)).astype(np.float32)  # 240 000 bytes: 4 pages of 64 KiB
BIAS = np.arange(50, dtype=np.int16) % 100
STEPS = np.arange(20000, dtype=np.int64)


def numpy_of(found: Tensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(found[2], found[0]).reshape(found[1])


def flip(path: Path, offset: int, length: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        data = file.read(length)
        assert len(data) == length
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in data))


def simple(builder: Builder, number: int, step: int | None = None, **more: Any) -> int:
    """A commit of two small tensors that tell it from any other."""
    chunks = {"a": array(np.full(1000, number, np.float32)), "b": array(np.full(3, number, np.int64))}
    return builder.commit(chunks, {"d": {"a": tensor("a", [1000]), "b": tensor("b", [3])}}, step=step, **more)


def file_of(path: Path) -> dict[str, dict[str, Any]]:
    """What a safetensors file holds: dtype, shape and data by name."""
    return dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]


def value(store: Path, **which: Any) -> int:
    found = rescue.read(store, **which)
    assert set(found) == {"a", "b"}
    assert (numpy_of(found["a"]) == numpy_of(found["b"])[0]).all()
    return int(numpy_of(found["b"])[0])
