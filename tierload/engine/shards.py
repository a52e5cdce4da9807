"""Where the bytes of a commit are that several ranks have written: which shard holds which part of a tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from tierload import _native
from tierload.engine.loading import table_of
from tierload.errors import CorruptStore
from tierload.layout import ManifestTable
from tierload.plan import holders, overlap
from tierload.state import StoredTensor, read_documents
from tierload.types import Box, Commit

__all__ = ["Shards", "stored_boxes"]

_log = logging.getLogger("tierload")


class Shards:
    """One commit as a rank sees it. Shards are opened when something of them is wanted: each is verified then.

    ``rank`` of ``ranks`` is who loads; where they are as many as have saved, it gets the own values of its own rank.
    """

    def __init__(self, commit: Commit, open_shard: Callable[[int], _native.Manifest], *, rank: int, ranks: int) -> None:
        self.commit = commit
        self._open_shard = open_shard
        self._manifests: dict[int, _native.Manifest] = {}
        self._tables: dict[int, ManifestTable] = {}
        owner = rank % commit.ranks
        own = None if owner == 0 else self.manifest(owner).state.tobytes()
        self.whole = read_documents(self.manifest(0).state.tobytes(), own, owner)
        self.document, self.chunks = self.whole.document, self.whole.chunks
        if ranks != commit.ranks and ranks > 1 and self.whole.own:
            keys = ", ".join(self.whole.own[:5]) + (" and more" if len(self.whole.own) > 5 else "")
            _log.warning(
                "commit %s (step %s) is by %d ranks, and %d load it: of %s, which each rank has of its own, rank %d "
                "gets what rank %d had. load(rank=...) gives those of others",
                *(commit.id[:12], commit.step, commit.ranks, ranks, keys, rank, owner),
            )

    def manifest(self, rank: int) -> _native.Manifest:
        """The shard of a rank."""
        if rank not in self._manifests:
            self._manifests[rank] = self._open_shard(rank)
        return self._manifests[rank]

    def table(self, rank: int) -> ManifestTable:
        """The tables of a rank's shard."""
        if rank not in self._tables:
            self._tables[rank] = table_of(self.manifest(rank))
        return self._tables[rank]

    def pieces(self, chunk: int, box: Box) -> Iterator[tuple[int, int, Box]]:
        """The stored parts of a tensor (by its number in ``whole``) that meet ``box``: whose shard, the chunk's number
        there, and which box of the tensor it is.

        Raises:
            CorruptStore: A shard does not have what the others say it has.
        """
        tensor = self.whole.tensors[chunk]
        for rank, stored in stored_boxes(tensor, box):
            number = self._number(rank, tensor, stored)
            if number is None:
                raise CorruptStore(
                    f"commit {self.commit.id[:12]} (step {self.commit.step}): the shard of rank {rank} has no part of "
                    f"{tensor.key!r} at {stored.offsets} of sizes {stored.sizes}: the shards are not of one state"
                )
            yield rank, number, stored

    def _number(self, rank: int, tensor: StoredTensor, stored: Box) -> int | None:
        if rank >= self.commit.ranks:
            return None
        for info in self.table(rank).pieces(tensor.key):
            if info.offsets == stored.offsets:
                alike = info.sizes == stored.sizes and info.shape == tensor.shape and info.dtype == tensor.dtype
                return info.number if alike else None
        return None


def stored_boxes(tensor: StoredTensor, box: Box) -> Iterator[tuple[int, Box]]:
    """The parts that a tensor is stored in and that meet ``box``: whose shard has it, and which box of the tensor it
    is."""
    if 0 in box.sizes:
        return
    if tensor.layout is not None:
        yield from holders(tensor.shape, tensor.layout, tensor.parts[0][2], box)
        return
    for begin, end, rank in tensor.parts:
        stored = Box((0,) * len(tensor.shape), tensor.shape)
        if end >= 0:
            stored = Box((begin, *stored.offsets[1:]), (end - begin, *stored.sizes[1:]))
        if overlap(stored, box) is not None:
            yield rank, stored
