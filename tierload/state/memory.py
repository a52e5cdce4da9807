"""The memory that a load fills: one buffer a chunk, made when the first value that needs it is met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tierload.errors import CorruptStore, UnsupportedValue
from tierload.state.dtypes import BY_CODE, CODE_NAMES, DType
from tierload.types import ChunkInfo, Destination

__all__ = ["Memory"]

_INT64_MAX = (1 << 63) - 1


class Memory:
    """Buffers by chunk number. Chunks are checked here against themselves: sizes, dtype and bytes agree."""

    def __init__(self, chunks: Sequence[ChunkInfo]) -> None:
        self._chunks = {chunk.number: chunk for chunk in chunks}
        self._rows: dict[object, tuple[ChunkInfo, DType]] = {}  # those that have been checked
        self._tensors: dict[int, torch.Tensor] = {}
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}

    def row(self, number: object) -> tuple[ChunkInfo, DType]:
        """A chunk that the document names, and its dtype.

        Raises:
            CorruptStore: There is no such chunk, or it contradicts itself.
            UnsupportedValue: This torch lacks its dtype.
        """
        if type(number) is int and number in self._rows:
            return self._rows[number]
        chunk = self._chunks.get(number) if type(number) is int else None
        if chunk is None:
            raise CorruptStore(f"the state document names chunk {number!r:.40}, which the manifest does not have")
        row = BY_CODE.get(chunk.dtype)
        if row is None:
            name = CODE_NAMES.get(chunk.dtype)
            if name is None:
                raise CorruptStore(f"key {chunk.key!r}: unknown dtype code {chunk.dtype}")
            raise UnsupportedValue(f"key {chunk.key!r} has dtype {name}, which torch {torch.__version__} lacks")
        if chunk.sizes != chunk.shape or any(chunk.offsets):
            raise CorruptStore(f"key {chunk.key!r} is a part of a tensor; only whole ones can be loaded here")
        if min(chunk.sizes, default=0) < 0 or math.prod(chunk.sizes) * row.size != chunk.nbytes:
            raise CorruptStore(f"key {chunk.key!r}: {chunk.nbytes} bytes for sizes {chunk.sizes} of {row.name}")
        if chunk.nbytes > _INT64_MAX:
            raise CorruptStore(f"key {chunk.key!r}: {chunk.nbytes} bytes")
        self._rows[number] = chunk, row
        return chunk, row

    def tensor(self, number: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A tensor that owns the memory of a chunk: of ``shape`` if it is made now, flat without one."""
        tensor = self._tensors.get(number)
        if tensor is None:
            chunk, row = self.row(number)
            if number in self._arrays:
                raise CorruptStore(f"key {chunk.key!r} is both a tensor and something else in the state document")
            sizes = (chunk.nbytes // row.size,) if shape is None else shape
            try:
                tensor = torch.empty(sizes, dtype=row.torch, device="cpu")
            except RuntimeError as error:
                raise MemoryError(f"key {chunk.key!r} needs {chunk.nbytes} bytes of memory: {error}") from error
            self._tensors[number] = tensor
        return tensor

    def has_tensor(self, number: int) -> bool:
        """Whether ``tensor`` has made the memory of this chunk."""
        return number in self._tensors

    def array(self, number: object, shape: Sequence[int], dtype: np.dtype[Any], order: str) -> np.ndarray[Any, Any]:
        """An array that owns the memory of a chunk of raw bytes; each belongs to one value."""
        chunk, row = self.row(number)
        if chunk.number in self._arrays or chunk.number in self._tensors or row.name != "uint8":
            raise CorruptStore(f"key {chunk.key!r} is used twice in the state document")
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != chunk.nbytes:
            raise CorruptStore(f"key {chunk.key!r}: {chunk.nbytes} bytes for an array {tuple(shape)} of {dtype}")
        try:
            array = np.empty(shape, dtype, order="F" if order == "F" else "C")
        except (MemoryError, ValueError) as error:
            raise MemoryError(f"key {chunk.key!r} needs {chunk.nbytes} bytes of memory: {error}") from error
        self._arrays[chunk.number] = array
        return array

    def destinations(self) -> list[Destination]:
        """Where the bytes of the chunks go that have been asked for; chunks without bytes need none."""
        tensors = [
            Destination(number, tensor.data_ptr(), self._chunks[number].nbytes, tensor)
            for number, tensor in self._tensors.items()
        ]
        arrays = [
            Destination(number, array.ctypes.data, self._chunks[number].nbytes, array)
            for number, array in self._arrays.items()
        ]
        return sorted((spot for spot in tensors + arrays if spot.nbytes), key=lambda spot: spot.chunk)
