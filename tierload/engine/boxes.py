"""Boxes of stored tensors, read by themselves: for those who compare tensors that are cut in other ways."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

import numpy as np
import numpy.typing as npt

from tierload.engine.inventory import Inventory, Tensor
from tierload.plan import LocalBox, copies
from tierload.types import Box

__all__ = ["read_box", "slabs"]

_ELEMENTS = 1 << 20  # of a slab: with 16 bytes each, and runs of one each, two sides take some 100 MiB


def slabs(box: Box) -> Iterator[Box]:
    """A box in parts of bounded size, in row-major order."""
    stack = [box]
    while stack:
        one = stack.pop()
        if prod(one.sizes) <= _ELEMENTS:
            yield one
            continue
        dim = next(dim for dim, size in enumerate(one.sizes) if size > 1)
        step = max(_ELEMENTS // prod(one.sizes[dim + 1 :]), 1)
        offset, size = one.offsets[dim], one.sizes[dim]
        cut = [_along(one, dim, offset + at, min(step, size - at)) for at in range(0, size, step)]
        stack.extend(reversed(cut))


def _along(box: Box, dim: int, offset: int, size: int) -> Box:
    """A box that is another one but in one dimension."""
    return Box((*box.offsets[:dim], offset, *box.offsets[dim + 1 :]), (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))


def read_box(inventory: Inventory, tensor: Tensor, box: Box, threads: int) -> npt.NDArray[np.uint8]:
    """The bytes of a box of a tensor, row-major.

    Raises:
        CorruptPage: A page of it is damaged.
    """
    item_bytes = tensor.stored.nbytes // prod(tensor.stored.shape)
    out = np.empty(prod(box.sizes) * item_bytes, np.uint8)
    strides, step = [], item_bytes
    for size in reversed(box.sizes):
        strides.append(step)
        step *= size
    target = LocalBox(box, (0,) * len(box.sizes))
    by_rank: defaultdict[int, list[tuple[npt.NDArray[np.int64], ...]]] = defaultdict(list)
    for piece in tensor.pieces:
        sources, targets, lengths = copies(piece.box, target, tuple(reversed(strides)), item_bytes)
        if len(sources):
            by_rank[piece.rank].append((np.full(len(sources), piece.number), sources, targets, lengths))
    for rank, runs in by_rank.items():
        numbers, sources, targets, lengths = (np.concatenate(column) for column in zip(*runs, strict=True))
        manifest, table = inventory.shard(rank)
        addresses = (targets + out.ctypes.data).astype(np.uint64)
        reads = table.plan_parts(numbers, sources, addresses, lengths, np.zeros(len(numbers), np.uint32))
        manifest.read(
            pages=reads.pages,
            offsets=reads.offsets,
            pointers=reads.pointers,
            lengths=reads.lengths,
            threads=threads,
            touched=np.zeros(len(reads.pages), np.uint8),
            progress=None,
        )
    return out
