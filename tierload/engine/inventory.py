"""What a commit holds, of every rank: tensors, and where each of their pieces is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.engine.loading import table_of
from tierload.engine.shards import stored_boxes
from tierload.layout import CHUNK_PACKED, ROOT_ROW, ManifestTable
from tierload.state import Listed, StoredTensor, listed, own_keys
from tierload.types import Box, ChunkInfo, Commit

__all__ = ["Fault", "Inventory", "Piece", "Root", "Tensor", "find_info", "grid_fault"]

_OPEN = 64  # shards that are kept open: there may be thousands


class Root:
    """Which shards a commit is made of. ``vector`` is its version vector: for each rank the transaction that last
    changed its shard.

    Raises:
        CorruptStore: Neither copy of the root file serves.
    """

    def __init__(self, native: _native.Store, commit: Commit) -> None:
        self._native = native
        self._ranks = commit.ranks
        self._rows = np.frombuffer(native.root(commit.txid), ROOT_ROW)
        self.vector: npt.NDArray[np.int64] = self._rows["txid"].astype(np.int64)

    def open(self, rank: int) -> _native.Manifest:
        """The shard of a rank. Raises CorruptStore when neither copy of it serves."""
        return self._native.shard(self._rows[rank].tobytes(), self._ranks)

    def path(self, rank: int) -> str:
        """Where the shard of a rank is, in the store."""
        row = self._rows[rank]
        return f"man/{int(row['epoch']):08x}-{int(row['txid']):012x}.r{rank:04x}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What does not fit together in shards that are each as they were written."""

    rank: int
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored box of a tensor: chunk ``number`` of the shard of ``rank``. ``digests`` are the raw digests of its
    pages, ``lengths`` their raw lengths in bytes, and ``at`` the byte of the first one that it begins at."""

    rank: int
    number: int
    box: Box
    packed: bool
    at: int
    digests: bytes
    lengths: bytes


@dataclass(slots=True)
class Tensor:
    """A whole tensor, the ``number``-th of all ranks, or of its owner. ``planned`` says which ranks have which boxes of
    it by the documents; ``pieces`` are those that are there."""

    stored: StoredTensor
    number: int
    planned: list[tuple[int, Box]]
    pieces: list[Piece] = field(default_factory=list)


class Inventory:
    """Everything in a commit, by key and owner (-1: of all ranks). Shards are gone through one after the other when it
    is made. ``own_keys`` are the places of values that each rank has of its own, and ``own_values`` says how many
    of them are in each shard; ``strays`` are chunks that no document names, with the rank whose shard has them.

    Raises:
        CorruptStore: A shard, or its document, is damaged.
    """

    def __init__(self, commit: Commit, open_shard: Callable[[int], _native.Manifest]) -> None:
        self.tensors: dict[tuple[str, int], Tensor] = {}
        self.strays: list[tuple[int, ChunkInfo]] = []
        self.own_keys: tuple[str, ...] = ()
        self.own_values: list[int] = []
        self._open_shard = open_shard
        self._open: dict[int, tuple[_native.Manifest, ManifestTable]] = {}
        self._wanted: defaultdict[int, defaultdict[tuple[str, Box], list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for rank in range(commit.ranks):
            manifest, table = self.shard(rank)
            infos = table.chunks.infos()
            pieces = _pieces(rank, table, infos)
            if commit.ranks == 1:  # a hundred thousand tensors are not looked for one by one
                self.own_values.append(0)
                for info, piece in zip(infos, pieces, strict=True):
                    stored = StoredTensor(info.key, info.dtype, info.shape, None, ((0, -1, 0),), info.nbytes)
                    self.tensors[info.key, -1] = Tensor(stored, info.number, [(0, piece.box)], [piece])
                return
            document = manifest.state.tobytes()
            self.own_keys = own_keys(document) if rank == 0 else self.own_keys
            self._add(listed(document, rank))
            wanted: dict[tuple[str, Box], list[Tensor]] = self._wanted.pop(rank, defaultdict(list))
            for info, piece in zip(infos, pieces, strict=True):
                self._find(info, piece, wanted.get((info.key, piece.box), ()))

    def shard(self, rank: int) -> tuple[_native.Manifest, ManifestTable]:
        """The shard of a rank and its tables."""
        if rank not in self._open:
            if len(self._open) >= _OPEN:
                del self._open[next(iter(self._open))]
            manifest = self._open_shard(rank)
            self._open[rank] = manifest, table_of(manifest)
        return self._open[rank]

    def infos(self) -> list[ChunkInfo]:
        """Every tensor as one whole chunk, in the order of keys; those that ranks have of their own once for each."""
        found = [_info(tensor.stored, tensor.number) for tensor in self.tensors.values()]
        return sorted(found, key=lambda info: (info.key.encode("utf-8", "surrogatepass"), info.rank or 0))

    def faults(self) -> Iterator[Fault]:
        """Where the pieces are not those that the documents name, or do not make up a tensor exactly."""
        if len(self.own_values) == 1:  # of one rank every chunk is a tensor, which the manifest's own checks cover
            return
        for rank, count in enumerate(self.own_values):
            if count != len(self.own_keys):
                what = f"rank {rank} has {count} values of its own, and the state places for {len(self.own_keys)}"
                yield Fault(rank, "", what)
        for tensor in self.tensors.values():
            key, there = tensor.stored.key, {(piece.rank, piece.box) for piece in tensor.pieces}
            for rank, box in tensor.planned:
                if (rank, box) not in there:
                    what = f"the shard of rank {rank} has no part of {key!r} at {box.offsets} of sizes {box.sizes}"
                    yield Fault(rank, key, what)
            if fault := grid_fault(tensor.stored.shape, [box for _, box in tensor.planned]):
                yield Fault(-1, key, f"the parts of {key!r} do not make up its shape {tensor.stored.shape}: {fault}")
        for rank, info in self.strays:
            what = f"the shard of rank {rank} has a part of {info.key!r} at {info.offsets} of sizes {info.sizes} "
            yield Fault(rank, info.key, what + "which is of no tensor of this state")

    def _add(self, what: Listed) -> None:
        self.own_values.append(what.own_values)
        numbers: defaultdict[int, int] = defaultdict(int)
        for stored in what.tensors:
            planned = list(stored_boxes(stored, _whole(stored.shape)))
            tensor = Tensor(stored, numbers[stored.owner], planned)
            numbers[stored.owner] += 1
            self.tensors[stored.key, stored.owner] = tensor
            for rank, box in planned:
                self._wanted[rank][stored.key, box].append(tensor)

    def _find(self, info: ChunkInfo, piece: Piece, wanted: Iterable[Tensor]) -> None:
        """Gives a piece to the tensors that it is one of: several where an own value shares memory with others."""
        found = [one for one in wanted if (one.stored.dtype, one.stored.shape) == (info.dtype, info.shape)]
        for tensor in found:
            tensor.pieces.append(piece)
        if not found and info.nbytes:
            self.strays.append((piece.rank, info))


def _pieces(rank: int, table: ManifestTable, infos: Iterable[ChunkInfo]) -> Iterator[Piece]:
    """The chunks of a shard."""
    names = ("flags", "page_offset", "first_page", "pages")
    columns = zip(*(table.rows[name].tolist() for name in names), strict=True)
    digests, lengths = table.pages["raw_digest"].tobytes(), table.pages["raw_length"].tobytes()
    for info, (flags, at, first, count) in zip(infos, columns, strict=True):
        yield Piece(
            rank=rank,
            number=info.number,
            box=Box(info.offsets, info.sizes),
            packed=bool(flags & CHUNK_PACKED),
            at=at,
            digests=digests[16 * first : 16 * (first + count)],
            lengths=lengths[4 * first : 4 * (first + count)],
        )


def find_info(key: str, owner: int, open_shard: Callable[[int], _native.Manifest]) -> ChunkInfo | None:
    """What is stored under a key for all ranks, or else for ``owner``, without a look at what other ranks have."""
    for rank in dict.fromkeys((0, owner)):
        tensors = listed(open_shard(rank).state.tobytes(), rank).tensors
        shared = sum(one.owner < 0 for one in tensors)
        for number, stored in enumerate(tensors):
            if stored.key == key and stored.owner in (-1, owner):
                return _info(stored, number if stored.owner < 0 else number - shared)
    return None


def _whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def _info(stored: StoredTensor, number: int) -> ChunkInfo:
    """A tensor as the whole chunk that it would be by itself."""
    whole = _whole(stored.shape)
    owner = None if stored.owner < 0 else stored.owner
    return ChunkInfo(number, stored.key, stored.dtype, stored.shape, *whole, stored.nbytes, owner)


def grid_fault(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """Why boxes are not a grid that covers a tensor of ``shape`` exactly, or "". Tensors are cut in each dimension by
    itself, which gives such a grid."""
    if not boxes or 0 in shape:
        return "" if 0 in shape and not boxes else f"there are {len(boxes)} parts"
    cuts = [sorted({box.offsets[dim] for box in boxes}) for dim in range(len(shape))]
    ends = [dict(zip(begins, [*begins[1:], size], strict=True)) for begins, size in zip(cuts, shape, strict=True)]
    for box in boxes:
        for dim, (begin, size) in enumerate(zip(*box, strict=True)):
            if begin + size != ends[dim][begin]:
                what = "a hole" if begin + size < ends[dim][begin] else "an overlap"
                return f"{what} at {ends[dim][begin]} of dimension {dim}"
    if any(begins[:1] != [0] for begins in cuts):
        return "a hole at its beginning"
    count = prod(len(begins) for begins in cuts)
    if len(set(boxes)) != len(boxes):
        return "a part that is there twice"
    return "" if len(boxes) == count else f"{count - len(boxes)} of {count} parts are missing"
