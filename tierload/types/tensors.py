"""Values that describe tensors on their way to and from pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierload.errors import CorruptStore
from tierload.types.meshes import Box, Sharded

if TYPE_CHECKING:  # the command's help must not wait for numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["BoxDestination", "ChunkInfo", "ChunkTable", "Destinations", "FlatState", "LoadReport", "PartDestination"]


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One chunk as a manifest lists it: what a load knows before it reads a byte of data.

    ``rank`` says whose own value it is, in a list of what several ranks have saved; None: all of them have it.
    """

    number: int
    key: str
    dtype: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The chunks of a state, sorted by key (UTF-8 byte order), one array a column: there may be millions.

    Chunk ``i`` has its key in ``keys`` at ``key_offsets[i]``, and in ``dims`` from ``dims_at[i]`` on, each ``ndims[i]``
    numbers long, the whole tensor's shape, this chunk's offsets in it and its sizes, in elements. ``dtypes`` are the
    codes of docs/FORMAT.md section 6.
    """

    keys: bytes
    key_offsets: npt.NDArray[np.int64]
    key_lengths: npt.NDArray[np.int64]
    dtypes: npt.NDArray[np.uint8]
    ndims: npt.NDArray[np.uint8]
    dims_at: npt.NDArray[np.int64]
    dims: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)

    def key(self, number: int) -> str:
        """The key of one chunk.

        Raises:
            CorruptStore: It is no UTF-8.
        """
        start = int(self.key_offsets[number])
        key = self.keys[start : start + int(self.key_lengths[number])]
        try:
            return key.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise CorruptStore(f"a key in the manifest is no UTF-8: {key[:40]!r}") from None

    def keys_at(self, numbers: Sequence[int]) -> list[str]:
        """The keys of some chunks."""
        if not self.keys.isascii():
            return [self.key(number) for number in numbers]
        text, which = self.keys.decode("ascii"), list(numbers)
        starts, lengths = self.key_offsets[which].tolist(), self.key_lengths[which].tolist()
        return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def info(self, number: int) -> ChunkInfo:
        """One chunk by itself."""
        return next(self._infos(slice(number, number + 1)))

    def infos(self) -> list[ChunkInfo]:
        """Every chunk."""
        return list(self._infos(slice(None)))

    def _infos(self, which: slice) -> Iterator[ChunkInfo]:
        columns = (self.dtypes[which], self.ndims[which], self.dims_at[which], self.nbytes[which])
        numbers = range(len(self))[which]
        for number, dtype, ndim, at, nbytes in zip(numbers, *(column.tolist() for column in columns), strict=True):
            dims = self.dims[at : at + 3 * ndim].tolist()
            shape, offsets, sizes = (tuple(dims[i * ndim : (i + 1) * ndim]) for i in range(3))
            yield ChunkInfo(number, self.key(number), dtype, shape, offsets, sizes, nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class FlatState:
    """A state as the store keeps it: its chunks, where their bytes are, and the JSON document that refers to them by
    number (docs/FORMAT.md section 8).

    ``pointers[i]`` addresses the contiguous bytes of chunk ``i``, which stay valid and unchanged while ``owners`` is
    alive, in the memory of accelerator ``devices[i]`` (native/include/tierload/accelerator.h; 0: the processor). With
    ``strides[i]`` (in bytes, one for each of its sizes) it addresses the first of elements that lie apart, in the
    processor's memory. What an accelerator's current stream was given to do until the state was described, copies of
    odd layouts among it, may still be under way.
    ``item_sizes`` and ``floating`` are what the codec splits into planes, and how. ``notes`` are remarks for the user,
    such as layouts that are not restored. ``sharded`` says what the chunks are parts of that hold this rank's part of a
    tensor (the document gives its local shape). ``outline`` speeds up the flattening of the next state of the same
    structure, whose ``chunks`` are then the same object.
    """

    chunks: ChunkTable
    pointers: npt.NDArray[np.uint64]
    devices: npt.NDArray[np.uint8]
    strides: Mapping[int, tuple[int, ...]]
    item_sizes: npt.NDArray[np.uint8]
    floating: npt.NDArray[np.bool_]
    owners: object
    document: bytes
    notes: tuple[str, ...] = ()
    outline: object = None
    sharded: Mapping[int, Sharded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PartDestination:
    """Memory for the part of a chunk that one rank holds: all boxes of ``sharded`` for that rank. ``strides`` are those
    of the local tensor, in bytes, from ``pointer`` on, in the memory of accelerator ``device`` (0: the processor);
    ``item_bytes`` those of an element."""

    chunk: int
    sharded: Sharded
    pointer: int
    strides: tuple[int, ...]
    item_bytes: int
    owner: object
    device: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BoxDestination:
    """Memory for one box of a chunk. ``strides``, in bytes, are those of a tensor of the box's sizes, from ``pointer``
    on, in the memory of accelerator ``device`` (0: the processor); ``item_bytes`` those of an element."""

    chunk: int
    box: Box
    pointer: int
    strides: tuple[int, ...]
    item_bytes: int
    owner: object
    device: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Destinations:
    """Where a load puts bytes: all of chunk ``chunks[i]`` go to ``pointers[i]``, valid while ``owners`` is alive.

    A chunk has one destination at most; they are in the order of chunks, and those without bytes need none. ``parts``
    are memory for parts of chunks, besides. ``devices`` are the accelerators in whose memory the pointers are, 0 for
    the processor; None: it is the processor's, all of it. Earlier work of an accelerator's current stream may still use
    that memory.
    """

    chunks: npt.NDArray[np.int64]
    pointers: npt.NDArray[np.uint64]
    owners: object
    parts: Sequence[PartDestination | BoxDestination] = ()
    devices: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.chunks)

    def some(self, which: slice | list[bool]) -> Destinations:
        """Those of them, without parts."""
        devices = None if self.devices is None else self.devices[which]
        return Destinations(self.chunks[which], self.pointers[which], self.owners, devices=devices)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What ``load(into=..., strict=False)`` did: keys filled, and what did not match. Every field holds keys, but for
    ``notes``, and ``io``: which way the bytes came, and why not a faster one."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    io: str = ""
