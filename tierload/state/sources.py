"""Chunks that Python describes, on their way out: what the store is given of one, and what the document says of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tierload.state.chunking import Chunk, View
from tierload.state.dtypes import UINT8, DType
from tierload.state.footprints import contiguous_strides
from tierload.state.tensors import TensorLeaf

__all__ = ["Blob", "Described", "described", "texts"]


class Blob(NamedTuple):
    """Raw bytes that get a chunk; ``hole`` is where its number goes in the document."""

    key: str
    hole: int
    data: np.ndarray[Any, np.dtype[np.uint8]]


class Described(NamedTuple):
    """A chunk in numbers: what it is (dtype, sizes, bytes, strides in bytes) and where, in the memory of which
    accelerator (0: none); ``owner`` keeps its memory."""

    kind: tuple[DType, tuple[int, ...], int, tuple[int, ...]]
    pointer: int
    device: int
    owner: object


def described(chunk: Chunk | TensorLeaf | Blob) -> Described:
    """A chunk as the store is given it."""
    if isinstance(chunk, TensorLeaf):
        return Described((chunk.row, chunk.shape, chunk.nbytes, ()), chunk.start, chunk.device, chunk.tensor)
    if isinstance(chunk, Blob):
        nbytes = chunk.data.nbytes
        return Described((UINT8, (nbytes,), nbytes, ()), chunk.data.ctypes.data if nbytes else 0, 0, chunk.data)
    kind = chunk.row, chunk.sizes, chunk.nbytes, chunk.strides
    return Described(kind, chunk.pointer, chunk.device, chunk.owner)


def texts(chunks: Iterable[tuple[int, Chunk | TensorLeaf | Blob]]) -> list[tuple[int, str]]:
    """Hole and text of everything that shows a part of these chunks, which come with their numbers, ascending."""
    found: list[tuple[int, str]] = []
    ties = 0
    apart: dict[int, int] = {}
    for number, chunk in chunks:
        if isinstance(chunk, TensorLeaf):
            shape = ",".join(map(str, chunk.shape))
            found.append((chunk.hole, f'{{"chunk":{number},"shape":[{shape}]{chunk.marks}}}'))
        elif isinstance(chunk, Blob):
            found.append((chunk.hole, str(number)))
        else:
            tie = ""
            if len(chunk.views) > 1:
                tie = f',"tie":{ties}'
                ties += 1
            if chunk.apart is not None:
                tie += f',"apart":{apart.setdefault(id(chunk.apart), len(apart))}'
            found += [(view.leaf.hole, _view_json(number, chunk, view, tie)) for view in chunk.views]
    return found


def _view_json(number: int, chunk: Chunk, view: View, tie: str) -> str:
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
