"""What changed from one commit to another: by the digests of pages, and by bytes where pages are of other cuts."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tierload import _native
from tierload.catalog import decode_text
from tierload.engine.boxes import read_box, slabs
from tierload.engine.inventory import Inventory, Piece, Root, Tensor
from tierload.errors import CorruptStore, InvalidRequest
from tierload.state.pause import paused_collection
from tierload.types import Box, Commit, Difference

__all__ = ["compare"]


_PAGES = 64  # packed ones that are kept: one a dtype serves the next keys too


class _Side:
    """One of the two commits. What is under a key: the tensor of all ranks (owner -1), or that of each by itself."""

    def __init__(self, native: _native.Store, commit: Commit, threads: int) -> None:
        self.inventory = Inventory(commit, Root(native, commit).open)
        for fault in self.inventory.faults():
            raise CorruptStore(f"commit {commit.id[:12]} (step {commit.step}): {fault.text}")
        self.keys: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        for (key, owner), tensor in self.inventory.tensors.items():
            self.keys[key][owner] = tensor
        self._threads = threads
        self._pages: dict[tuple[int, int], bytes] = {}
        try:
            self.values = native.state_at(commit.lsn).values
        except (InvalidRequest, CorruptStore):  # older than the history that is kept, or than its damage
            self.values = {}

    def nbytes(self, key: str) -> int:
        """The bytes of what is under a key."""
        return sum(tensor.stored.nbytes for tensor in self.keys[key].values())

    def read(self, tensor: Tensor, box: Box) -> bytes:
        """The bytes of a box. Raises CorruptPage when a page of it is damaged."""
        return read_box(self.inventory, tensor, box, self._threads).tobytes()

    def packed(self, piece: Piece) -> bytes:
        """The bytes of a piece that shares its page with others."""
        manifest, table = self.inventory.shard(piece.rank)
        row = table.rows[piece.number]
        page = int(row["first_page"])
        if (piece.rank, page) not in self._pages:
            raw = np.empty(int(table.pages["raw_length"][page]), np.uint8)
            manifest.read(
                pages=np.array([page], np.uint32),
                offsets=np.zeros(1, np.uint32),
                pointers=np.array([raw.ctypes.data], np.uint64),
                lengths=np.array([raw.nbytes], np.uint64),
                threads=self._threads,
                touched=np.zeros(1, np.uint8),
                progress=None,
            )
            if len(self._pages) >= _PAGES:
                del self._pages[next(iter(self._pages))]
            self._pages[piece.rank, page] = raw.tobytes()
        return self._pages[piece.rank, page][piece.at : piece.at + int(row["bytes"])]


def compare(native: _native.Store, a: Commit, b: Commit, threads: int) -> Difference:
    """What changed from commit ``a`` to ``b``. Read are only packed pages that differ, and tensors that are cut into
    other pieces, or pages, than they were.

    A value that each rank has of its own is one key: it has changed when that of any rank has, or their number.
    """
    with paused_collection():
        old, new = _Side(native, a, threads), _Side(native, b, threads)
    added, removed = new.keys.keys() - old.keys.keys(), old.keys.keys() - new.keys.keys()
    both = sorted(old.keys.keys() & new.keys.keys())
    changed = [key for key in both if not _equal(old, new, key)]
    values = {key for key in old.values.keys() | new.values.keys() if old.values.get(key) != new.values.get(key)}
    return Difference(
        a=a.id,
        b=b.id,
        added=tuple(sorted(added)),
        removed=tuple(sorted(removed)),
        changed=tuple(changed),
        unchanged=len(both) - len(changed),
        changed_bytes=sum(new.nbytes(key) for key in [*changed, *added]),
        values=tuple(sorted(decode_text(key) for key in values)),
    )


def _equal(old: _Side, new: _Side, key: str) -> bool:
    before, after = old.keys[key], new.keys[key]
    return before.keys() == after.keys() and all(
        _same_tensor(old, new, before[owner], after[owner]) for owner in before
    )


def _same_tensor(old: _Side, new: _Side, before: Tensor, after: Tensor) -> bool:
    left, right = before.stored, after.stored
    if (left.dtype, left.shape, left.nbytes) != (right.dtype, right.shape, right.nbytes):
        return False
    ours, theirs = ({piece.box: piece for piece in tensor.pieces} for tensor in (before, after))
    if ours.keys() != theirs.keys():
        return all(_same_bytes(old, new, before, after, box) for box in ours)
    return all(_same_piece(old, new, before, after, ours[box], theirs[box]) for box in ours)


def _same_piece(old: _Side, new: _Side, before: Tensor, after: Tensor, left: Piece, right: Piece) -> bool:
    if (left.digests, left.at, left.packed) == (right.digests, right.at, right.packed):
        return True
    if left.packed and right.packed:
        return old.packed(left) == new.packed(right)
    if left.lengths == right.lengths and not left.packed and not right.packed:
        return False
    return _same_bytes(old, new, before, after, left.box)


def _same_bytes(old: _Side, new: _Side, before: Tensor, after: Tensor, box: Box) -> bool:
    return all(old.read(before, slab) == new.read(after, slab) for slab in slabs(box))
