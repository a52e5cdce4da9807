"""The memory that a load fills: one buffer a chunk, made when the first value that needs it is met."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierload import _native
from tierload.errors import CorruptStore, UnsupportedValue
from tierload.state.dtypes import BY_CODE, CODE_NAMES, DType
from tierload.state.tensors import TORCH, device_of
from tierload.types import BoxDestination, ChunkInfo, ChunkTable, Destinations, PartDestination

__all__ = ["NO_CHUNKS", "Memory", "no_memory"]

_BYTES, _NUMBERS = np.empty(0, np.uint8), np.empty(0, np.int64)

NO_CHUNKS = ChunkTable(b"", _NUMBERS, _NUMBERS, _BYTES, _BYTES, _NUMBERS, _NUMBERS, _NUMBERS)
"""The table of a state without tensors."""

_INT64_MAX = (1 << 63) - 1


class Memory:
    """Buffers by chunk number. Chunks are checked here against themselves: sizes, dtype and bytes agree.

    Raises:
        CorruptStore: A key is no UTF-8.
    """

    def __init__(self, chunks: ChunkTable) -> None:
        try:
            chunks.keys.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptStore(f"a key in the manifest is no UTF-8: {error}") from None
        self.chunks = chunks
        self._rows: dict[int, tuple[ChunkInfo, DType]] = {}  # those that have been checked
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self._table = _native.TensorTable(
            TORCH, torch.empty_like, chunks.dtypes, chunks.ndims, chunks.dims_at, chunks.dims, chunks.nbytes
        )

    def row(self, number: object) -> tuple[ChunkInfo, DType]:
        """A chunk that the document names, and its dtype.

        Raises:
            CorruptStore: There is no such chunk, or it contradicts itself.
            UnsupportedValue: This torch lacks its dtype.
        """
        if type(number) is not int or not 0 <= number < len(self.chunks):
            raise CorruptStore(f"the state document names chunk {number!r:.40}, which the manifest does not have")
        if number in self._rows:
            return self._rows[number]
        chunk = self.chunks.info(number)
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

    def fill_dict(self, nodes: dict[str, Any], into: dict[str, Any]) -> list[tuple[str, object]]:
        """Put what stands in a node into a dict, as far as that is scalars and plain tensors; key and node of the rest,
        whose places hold None."""
        with no_memory():
            return self._table.fill_dict(nodes, into, _empty)

    def fill_list(self, nodes: list[Any], into: list[Any]) -> list[tuple[int, object]]:
        """The same for a list."""
        with no_memory():
            return self._table.fill_list(nodes, into, _empty)

    def fill_pairs(self, pairs: list[Any], into: Any) -> list[tuple[Any, object]] | None:
        """The same for pairs of key and node; None when a key is no scalar."""
        with no_memory():
            return self._table.fill_pairs(pairs, into, _empty)

    def bind(self, live: Any, nodes: dict[Any, Any]) -> list[Any]:
        """Bind tensors of a target, the values of a mapping, to the chunks of their nodes where the two are alike and
        nothing else is to be said: they will be read right into them. The keys of the rest."""
        return self._table.bind(live, nodes)

    def unbind(self, chunks: list[int], others: list[tuple[int, int]]) -> list[tuple[ChunkInfo, DType, torch.Tensor]]:
        """Chunk and tensor of those that cannot stay bound: the chunk has another use, or the tensor meets another one
        that is filled, or one of ``others`` (ranges of addresses), in memory."""
        return [(*self.row(number), tensor) for number, tensor in self._table.unbind(chunks, others)]

    def bound(self) -> tuple[npt.NDArray[np.int64], list[torch.Tensor]]:
        """The chunks that are bound, and their tensors."""
        chunks, _, _, tensors = self._table.bound()
        return chunks, tensors  # type: ignore[return-value]

    def whole(self, number: int) -> torch.Tensor | None:
        """The tensor that is a whole chunk, the same each time; None when the chunk's memory is another's."""
        chunk, _ = self.row(number)
        with no_memory(chunk):
            tensor = self._table.whole(number, _empty)
        assert tensor is None or isinstance(tensor, torch.Tensor)
        return tensor

    def tensor(self, number: int) -> torch.Tensor:
        """A tensor that owns the memory of a chunk, whatever its shape."""
        tensor = self._table.get(number) if self.has_tensor(number) else None
        if tensor is None:
            chunk, row = self.row(number)
            with no_memory(chunk):
                tensor = torch.empty((chunk.nbytes // row.size,), dtype=row.torch, device="cpu")
            self._table.put(number, tensor)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def has_tensor(self, number: int) -> bool:
        """Whether the memory of this chunk has been made, or taken from a target.

        Raises:
            CorruptStore: It has, and is not a tensor's.
        """
        if number in self._arrays:
            key = self.chunks.key(number)
            raise CorruptStore(f"key {key!r} is both a tensor and something else in the state document")
        return self._table.get(number) is not None

    def asked_for(self) -> set[int]:
        """The chunks whose memory values have asked for so far."""
        chunks, _, _, _ = self._table.made()
        return {*chunks.tolist(), *self._arrays}

    def array(self, number: object, shape: Sequence[int], dtype: np.dtype[Any], order: str) -> np.ndarray[Any, Any]:
        """An array that owns the memory of a chunk of raw bytes; each belongs to one value."""
        chunk, row = self.row(number)
        if chunk.number in self._arrays or self.has_tensor(chunk.number) or row.name != "uint8":
            raise CorruptStore(f"key {chunk.key!r} is used twice in the state document")
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != chunk.nbytes:
            raise CorruptStore(f"key {chunk.key!r}: {chunk.nbytes} bytes for an array {tuple(shape)} of {dtype}")
        with no_memory(chunk):
            array = np.empty(shape, dtype, order="F" if order == "F" else "C")
        self._table.put(chunk.number, None)
        self._arrays[chunk.number] = array
        return array

    def destinations(
        self,
        direct: Sequence[tuple[int, torch.Tensor]] = (),
        parts: Sequence[PartDestination | BoxDestination] = (),
    ) -> Destinations:
        """Where the bytes of the chunks go that have been asked for or bound, and those that go to ``direct``; and the
        ``parts`` of chunks."""
        more: list[tuple[int, int, int, object]] = [
            (number, array.ctypes.data, 0, array) for number, array in self._arrays.items() if array.nbytes
        ]
        more += [(number, tensor.data_ptr(), device_of(tensor), tensor) for number, tensor in direct]
        found = (self._table.made(), self._table.bound(), tuple(zip(*more, strict=True)) or ((), (), (), ()))
        chunks, pointers, devices = (
            np.concatenate([np.asarray(each[column], kind) for each in found])
            for column, kind in enumerate((np.int64, np.uint64, np.uint8))
        )
        order = np.argsort(chunks, kind="stable")
        order = order[self.chunks.nbytes[chunks[order]] > 0]
        keepers = [each[3] for each in found]
        return Destinations(chunks[order], pointers[order], keepers, parts, devices[order])


def _empty(code: int, sizes: list[int]) -> torch.Tensor:
    return torch.empty(sizes, dtype=BY_CODE[code].torch, device="cpu")


@contextmanager
def no_memory(chunk: ChunkInfo | None = None) -> Iterator[None]:
    """What torch and numpy raise when there is no memory left, as the error for it."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:
        what = f"key {chunk.key!r} needs {chunk.nbytes} bytes," if chunk else "a tensor of the state needs"
        raise MemoryError(f"{what} more memory than there is: {error}") from error
