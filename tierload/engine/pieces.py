"""What one rank writes of a state that several ranks hold: its part of spread tensors, its share of what all of them
have, and its own values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tierload.plan import Item, assign_writers, local_boxes, replica
from tierload.plan import Part as PlannedPart
from tierload.state import Cut
from tierload.types import Box, ChunkInfo, ChunkTable, FlatState, Layout

__all__ = ["ALPHA", "Part", "Piece", "item_of", "parts_of", "pieces_of", "shared_parts", "state_of"]

Part = tuple[int, int, int]
"""Rows from, to (-1: all), and the replica that writes them."""

ALPHA = 0.5  # what a cut more weighs against a rank that writes more than the others


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of chunk ``chunk`` of a flat state: which box of the whole tensor it is, and where its first element lies
    in the chunk, in elements of each of its dimensions."""

    chunk: int
    shape: tuple[int, ...]
    box: Box
    at: tuple[int, ...]


def shared_parts(
    whole: Cut, is_own: Sequence[bool], flat: FlatState, ranks: int, page_bytes: int
) -> dict[int, tuple[Part, ...]]:
    """Who writes what of the chunks that are not each rank's own: the same on every rank."""
    parts: dict[int, tuple[Part, ...]] = {}
    items: list[Item] = []
    numbers: list[int] = []
    for chunk in sorted({n for unit, own in zip(whole.units, is_own, strict=True) if not own for n in unit.chunks}):
        info, spread = flat.chunks.info(chunk), flat.sharded.get(chunk)
        layout = None if spread is None else spread.layout
        if layout is not None and None not in layout.placements:
            parts[chunk] = ((0, -1, 0),)
            continue
        shape = info.sizes if spread is None else spread.shape
        nbytes = info.nbytes if spread is None else prod(shape) * _item_bytes(flat, chunk)
        items.append(item_of(info.key, nbytes, shape, layout))
        numbers.append(chunk)
    for chunk, assigned in zip(numbers, assign_writers(items, ranks, None, page_bytes, ALPHA), strict=True):
        parts[chunk] = parts_of(assigned)
    return parts


def item_of(key: str, nbytes: int, shape: tuple[int, ...], layout: Layout | None) -> Item:
    """A tensor as the plan of who writes knows it."""
    rows = shape[0] if shape else 1
    return Item(key, nbytes, rows, nbytes // max(rows, 1), layout, shape)


def parts_of(assigned: Sequence[PlannedPart]) -> tuple[Part, ...]:
    """What a plan says of one tensor, as documents have it."""
    whole = len(assigned) == 1
    return tuple((one.begin_row, -1 if whole else one.end_row, one.replica) for one in assigned)


def _item_bytes(flat: FlatState, chunk: int) -> int:
    """Bytes of an element: of a complex number, two items."""
    info = flat.chunks.info(chunk)
    count = prod(info.sizes)
    return info.nbytes // count if count else int(flat.item_sizes[chunk])


def pieces_of(
    whole: Cut, is_own: Sequence[bool], flat: FlatState, parts: Mapping[int, Sequence[Part]], rank: int
) -> list[Piece]:
    """Everything that this rank writes, in the order of a manifest."""
    found: list[Piece] = []
    done: set[int] = set()
    for unit, own in zip(whole.units, is_own, strict=True):
        for chunk in unit.chunks:
            if chunk not in done:
                done.add(chunk)
                found += _pieces(flat, chunk, None if own else parts[chunk], rank)
    return sorted(
        found, key=lambda piece: (flat.chunks.key(piece.chunk).encode("utf-8", "surrogatepass"), piece.box.offsets)
    )


def _pieces(flat: FlatState, chunk: int, parts: Sequence[Part] | None, rank: int) -> Iterable[Piece]:
    info, spread = flat.chunks.info(chunk), flat.sharded.get(chunk)
    if spread is not None and parts is not None:
        if not info.nbytes or replica(spread.layout, rank)[0] != parts[0][2]:
            return
        for local in local_boxes(spread.shape, spread.layout, rank):
            yield Piece(chunk, spread.shape, local.box, local.at)
        return
    nothing = (0,) * len(info.sizes)
    if parts is None or (len(parts) == 1 and parts[0][1] < 0):
        if parts is None or parts[0][2] == rank:
            yield Piece(chunk, info.sizes, Box(nothing, info.sizes), nothing)
        return
    for begin, end, writer in parts:
        if writer == rank and end > begin:
            at = (begin, *nothing[1:])
            yield Piece(chunk, info.sizes, Box(at, (end - begin, *info.sizes[1:])), at)


def state_of(flat: FlatState, pieces: Sequence[Piece], document: bytes) -> FlatState:
    """The pieces as a state of their own, over the memory of the one that they are parts of."""
    infos = [flat.chunks.info(piece.chunk) for piece in pieces]
    keys = [info.key.encode("utf-8", "surrogatepass") for info in infos]
    lengths = np.array([len(key) for key in keys], np.int64)
    ndims = np.array([len(piece.shape) for piece in pieces], np.int64)
    dims = [n for piece in pieces for n in (*piece.shape, *piece.box.offsets, *piece.box.sizes)]
    chunks = np.array([piece.chunk for piece in pieces], np.int64)
    strides: dict[int, tuple[int, ...]] = {}
    pointers, nbytes = [], []
    for number, (piece, info) in enumerate(zip(pieces, infos, strict=True)):
        element = _item_bytes(flat, piece.chunk)
        steps = flat.strides.get(piece.chunk) or _contiguous(info, element)
        pointers.append(
            int(flat.pointers[piece.chunk]) + sum(n * step for n, step in zip(piece.at, steps, strict=True))
        )
        nbytes.append(prod(piece.box.sizes) * element)
        if nbytes[-1] and not _lies_together(piece.box.sizes, steps, element):
            strides[number] = steps
    table = ChunkTable(
        keys=b"".join(keys),
        key_offsets=np.cumsum(lengths) - lengths,
        key_lengths=lengths,
        dtypes=flat.chunks.dtypes[chunks],
        ndims=ndims.astype(np.uint8),
        dims_at=3 * (np.cumsum(ndims) - ndims),
        dims=np.array(dims, np.int64),
        nbytes=np.array(nbytes, np.int64),
    )
    return replace(
        flat,
        chunks=table,
        pointers=np.array(pointers, np.uint64),
        strides=strides,
        item_sizes=flat.item_sizes[chunks],
        devices=flat.devices[chunks],
        floating=flat.floating[chunks],
        document=document,
        outline=None,
        sharded={},
    )


def _contiguous(info: ChunkInfo, element: int) -> tuple[int, ...]:
    steps, step = [], element
    for size in reversed(info.sizes):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def _lies_together(sizes: Sequence[int], steps: Sequence[int], element: int) -> bool:
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if size > 1 and step != element:
            return False
        element *= size
    return True
