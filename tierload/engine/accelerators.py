"""What the framework knows of accelerators: their memory and their streams, by the numbers of the native core."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierload import _native

__all__ = ["DeviceMemory", "allocate", "free_bytes", "present", "streams", "synchronize"]

_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DeviceMemory:
    """Memory of accelerator ``number``, in a pool of its own, as long as this lives."""

    number: int
    pointer: int
    nbytes: int
    owner: object


def allocate(number: int, nbytes: int) -> DeviceMemory | None:
    """Memory that the training's own is not cut up by; None when there is not so much."""
    fake = _fake(number)
    if fake is not None:
        memory = fake.allocate(nbytes)
        return DeviceMemory(number, memory.ctypes.data, nbytes, memory)
    pool = torch.cuda.MemPool()
    try:
        with torch.cuda.use_mem_pool(pool, device=_device(number)):
            tensor = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=_device(number))
    except torch.cuda.OutOfMemoryError:
        return None
    # Let go of from the end: a pool gives back only what is free in it.
    owner = (pool, tensor)
    return DeviceMemory(number, -(-tensor.data_ptr() // _ALIGNMENT) * _ALIGNMENT, nbytes, owner)


def present(devices: npt.NDArray[np.uint8]) -> list[int]:
    """Which accelerators there are among the numbers of places; 0, the processor, is none."""
    return [number for number in np.flatnonzero(np.bincount(devices)).tolist() if number]


def free_bytes(number: int) -> int:
    """Bytes that nobody has."""
    return 1 << 40 if _fake(number) is not None else torch.cuda.mem_get_info(_device(number))[0]


def streams(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The stream that the caller gives its work on each accelerator to, by its handle."""
    return [
        (number, 0 if _fake(number) is not None else torch.cuda.current_stream(_device(number)).cuda_stream)
        for number in numbers
    ]


def synchronize(numbers: Iterable[int]) -> None:
    """Waits for what the caller has given accelerators to do."""
    for number in numbers:
        if _fake(number) is None:
            torch.cuda.current_stream(_device(number)).synchronize()


def _device(number: int) -> torch.device:
    return torch.device("cuda", number - 1)


def _fake(number: int) -> Any:
    """The accelerator of a test, if it is one."""
    found = _native.accelerator(number)
    return found if isinstance(found, _native.FakeAccelerator) else None
