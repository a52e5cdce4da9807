"""What changed from one commit to another: by the digests of their pages, and for small tensors by their bytes."""

from __future__ import annotations

import numpy as np

from tierload import _native
from tierload.catalog import decode_text
from tierload.engine.loading import table_of
from tierload.errors import CorruptStore, InvalidRequest
from tierload.layout import ManifestTable
from tierload.types import Commit, Difference

__all__ = ["compare"]


class _Side:
    """One of the two commits."""

    def __init__(self, native: _native.Store, commit: Commit, threads: int) -> None:
        self.manifest = native.manifest(commit.txid)
        self.table: ManifestTable = table_of(self.manifest)
        self.numbers = {info.key: info for info in self.table.chunks.infos()}
        self._threads = threads
        self._pages: dict[int, bytes] = {}
        try:
            self.values = native.state_at(commit.lsn).values
        except (InvalidRequest, CorruptStore):  # older than the history that is kept, or than its damage
            self.values = {}

    def packed_bytes(self, number: int) -> bytes:
        """The bytes of a chunk that shares its page with others. Raises CorruptPage when the page is damaged."""
        row = self.table.rows[number]
        page, offset = int(row["first_page"]), int(row["page_offset"])
        if page not in self._pages:
            raw = np.empty(int(self.table.pages["raw_length"][page]), np.uint8)
            self.manifest.read(
                pages=np.array([page], np.uint32),
                offsets=np.zeros(1, np.uint32),
                pointers=np.array([raw.ctypes.data], np.uint64),
                lengths=np.array([raw.nbytes], np.uint64),
                threads=self._threads,
                touched=np.zeros(1, np.uint8),
                progress=None,
            )
            self._pages[page] = raw.tobytes()
        return self._pages[page][offset : offset + int(row["bytes"])]


def compare(native: _native.Store, a: Commit, b: Commit, threads: int) -> Difference:
    """What changed from commit ``a`` to ``b``. Only packed pages that differ are read."""
    old, new = _Side(native, a, threads), _Side(native, b, threads)
    added, removed = new.numbers.keys() - old.numbers.keys(), old.numbers.keys() - new.numbers.keys()
    both = old.numbers.keys() & new.numbers.keys()
    changed = [key for key in both if not _equal(old, new, key)]
    values = {key for key in old.values.keys() | new.values.keys() if old.values.get(key) != new.values.get(key)}
    return Difference(
        a=a.id,
        b=b.id,
        added=tuple(sorted(added)),
        removed=tuple(sorted(removed)),
        changed=tuple(sorted(changed)),
        unchanged=len(both) - len(changed),
        changed_bytes=sum(new.numbers[key].nbytes for key in [*changed, *added]),
        values=tuple(sorted(decode_text(key) for key in values)),
    )


def _equal(old: _Side, new: _Side, key: str) -> bool:
    left, right = old.numbers[key], new.numbers[key]
    if (left.dtype, left.shape, left.sizes, left.nbytes) != (right.dtype, right.shape, right.sizes, right.nbytes):
        return False
    if old.table.raw_digests(left.number) == new.table.raw_digests(right.number):
        return True
    packed = old.table.is_packed(left.number) and new.table.is_packed(right.number)
    return packed and old.packed_bytes(left.number) == new.packed_bytes(right.number)
