"""From one world to another: what ranks of one layout stored, planned and read as a rank of another one needs it."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_layouts import layouts, shapes, torch_local
from plan_tables import Piece, Stored

from tierload.plan import Item, LocalBox, assign_writers, copies, holders, local_boxes, replica
from tierload.types import Box, Layout, Mesh

between_worlds = shapes().flatmap(
    lambda shape: st.tuples(st.just(shape), layouts(len(shape)), layouts(len(shape)), st.randoms(use_true_random=False))
)


def read(stored: Stored, wanted: list[tuple[Box, LocalBox]], local_shape: tuple[int, ...]) -> np.ndarray:
    """Fills a contiguous local tensor of single bytes from stored boxes of the key "w"."""
    numbers = {piece.offsets: piece.number for piece in stored.table.pieces("w")}
    strides = tuple(prod(local_shape[dim + 1 :]) for dim in range(len(local_shape)))
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for held, target in wanted:
        sources, destinations, lengths = copies(held, target, strides, 1)
        for column, values in zip(
            columns, (np.full(len(sources), numbers[held.offsets]), sources, destinations, lengths), strict=True
        ):
            column.append(values)
    chunks, sources, destinations, lengths = (np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)
    owners = np.zeros(len(chunks), np.uint32)
    plan = stored.table.plan_parts(chunks, sources, destinations.astype(np.uint64), lengths, owners)
    memory = np.zeros(prod(local_shape), np.uint8)
    stored.read(plan, memory)
    return memory


@settings(deadline=None, max_examples=150)
@given(between_worlds)
def test_any_layout_is_read_back_in_any_other(case) -> None:
    shape, old, new, random = case
    generator = torch.Generator().manual_seed(random.getrandbits(31))
    whole = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    copy = random.randrange(replica(old, old.mesh.ranks[0])[1])
    writers = [rank for rank in old.mesh.ranks if replica(old, rank)[0] == copy]
    boxes = [box for rank in writers for box, _ in local_boxes(shape, old, rank)]
    stored = Stored([Piece("w", shape, *box) for box in boxes], pack_below=16)
    for piece in stored.table.pieces("w"):
        place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
        stored.data[piece.number][:] = whole[place].numpy().reshape(-1)
    stored.lay_out()

    for rank in new.mesh.ranks:
        want = torch_local(whole, new, rank)
        wanted = [
            (held, target)
            for target in local_boxes(shape, new, rank)
            for _, held in holders(shape, old, copy, target.box)
        ]
        assert read(stored, wanted, tuple(want.shape)).tobytes() == want.numpy().tobytes()


def test_what_ranks_wrote_of_a_replicated_tensor_fills_any_shard() -> None:
    shape, row_bytes = (5000, 6), 6
    whole = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    (cut,) = assign_writers([Item("w", 30_000, 5000, row_bytes)], 7, None, 4096, 0.1)
    stored = Stored([Piece.rows("w", shape, part.begin_row, part.end_row) for part in cut])
    for piece, part in zip(stored.table.pieces("w"), cut, strict=True):
        stored.data[piece.number][:] = whole[part.begin_row : part.end_row].numpy().reshape(-1)
    stored.lay_out()
    layout = Layout(Mesh((2, 3), tuple(range(6))), ((0, 3), 1))
    boxes = [Box((part.begin_row, 0), (part.end_row - part.begin_row, 6)) for part in cut]
    for rank in range(6):
        want = torch_local(whole, layout, rank)
        wanted = [(box, target) for target in local_boxes(shape, layout, rank) for box in boxes]
        assert read(stored, wanted, tuple(want.shape)).tobytes() == want.numpy().tobytes()
