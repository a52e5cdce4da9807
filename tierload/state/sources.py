"""Chunks on their way out: what the engine is given of one, and what the document says of the views of it."""

from __future__ import annotations

from tierload.state.chunking import Chunk, View
from tierload.state.dtypes import DType
from tierload.state.footprints import contiguous_strides
from tierload.types import ChunkSource

__all__ = ["source", "view_json"]


def source(
    key: str,
    row: DType,
    sizes: tuple[int, ...],
    pointer: int,
    nbytes: int,
    owner: object,
    strides: tuple[int, ...] = (),
) -> ChunkSource:
    """A chunk as the engine takes it."""
    return ChunkSource(
        key, row.code, row.item_size, row.floating, sizes, (0,) * len(sizes), sizes, pointer, nbytes, owner, strides
    )


def view_json(number: int, chunk: Chunk, view: View, tie: str) -> str:
    """The content of a ``t`` that shows a part of a chunk, or shares it."""
    leaf = view.leaf
    shape = ",".join(map(str, leaf.shape))
    text = f'{{"chunk":{number},"shape":[{shape}]'
    whole = leaf.row is chunk.row and leaf.nbytes == chunk.nbytes
    if view.offset or not whole or view.stride != contiguous_strides(leaf.shape):
        text += f',"stride":[{",".join(map(str, view.stride))}],"offset":{view.offset}'
    if leaf.row is not chunk.row:
        text += f',"dtype":"{leaf.row.name}"'
    return f"{text}{leaf.marks}{tie}}}"
