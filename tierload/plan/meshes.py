"""Which rank holds what of a tensor that is spread over a mesh of ranks: it follows from mesh and placements alone.

Every rank works it out for itself, for any other rank, in closed form: nobody is asked, and no table of all ranks is
made to find the few that meet a box.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierload.errors import InvalidRequest
from tierload.plan.splits import Steps, extents_after, runs_of
from tierload.types import Box, Layout, Mesh

__all__ = ["LocalBox", "holders", "is_in", "local_boxes", "local_elements", "local_shape", "replica"]


class LocalBox(NamedTuple):
    """A box of a whole tensor that lies in a rank's local tensor, from the offsets ``at`` on."""

    box: Box
    at: tuple[int, ...]


# Models repeat a few shapes many times. What a box meets may be thousands of holders, so only some answers are kept.
@lru_cache(maxsize=1024)
def local_boxes(shape: tuple[int, ...], layout: Layout, rank: int) -> tuple[LocalBox, ...]:
    """The boxes of a tensor of ``shape`` that ``rank``'s local tensor is made of, in its row-major order.

    There are as few as can be, none for a rank outside the mesh or without elements.
    """
    coordinates = _coordinates(layout.mesh, rank)
    if coordinates is None:
        return ()
    lines = [
        runs_of(extent, steps, 0, extent, tuple(coordinates[dim] for dim in dims))
        for extent, (dims, steps) in zip(shape, _steps(len(shape), layout), strict=True)
    ]
    runs = [list(zip(line.starts.tolist(), line.sizes.tolist(), line.at.tolist(), strict=True)) for line in lines]
    return tuple(
        LocalBox(Box(tuple(run[0] for run in chosen), tuple(run[1] for run in chosen)), tuple(run[2] for run in chosen))
        for chosen in product(*runs)
    )


def local_shape(shape: tuple[int, ...], layout: Layout, rank: int) -> tuple[int, ...]:
    """The shape of ``rank``'s local tensor; ``(0,)`` outside the mesh, as torch has it."""
    coordinates = _coordinates(layout.mesh, rank)
    if coordinates is None:
        return (0,)
    extents = np.array(shape, np.int64)
    for number, placement in enumerate(layout.placements):
        if placement is not None:
            dim, factor = _cut(placement, len(shape))
            extents[dim] = extents_after(extents[dim], layout.mesh.shape[number], factor, coordinates[number])
    return tuple(extents.tolist())


def local_elements(shape: tuple[int, ...], layout: Layout) -> npt.NDArray[np.int64]:
    """How many elements the local tensor of each rank has, as an array of the mesh's shape."""
    sizes = layout.mesh.shape
    elements = np.ones(sizes, np.int64)
    for extent, (dims, steps) in zip(shape, _steps(len(shape), layout), strict=True):
        extents = np.array([extent])
        for ranks, factor in steps:
            extents = extents_after(extents[:, None], ranks, factor, np.arange(ranks)).reshape(-1)
        elements *= extents.reshape([size if number in dims else 1 for number, size in enumerate(sizes)])
    return elements


def is_in(mesh: Mesh, rank: int) -> bool:
    """Whether a rank is one of a mesh's: others hold nothing of what is spread over it."""
    return rank in _positions(mesh)


def replica(layout: Layout, rank: int) -> tuple[int, int]:
    """Which of the copies of its shard a rank holds, and how many there are: row-major over what is replicated.

    Raises:
        InvalidRequest: The rank is not in the mesh.
    """
    coordinates = _coordinates(layout.mesh, rank)
    if coordinates is None:
        raise InvalidRequest(f"rank {rank} is not in the mesh")
    index, count = 0, 1
    for placement, coordinate, size in zip(layout.placements, coordinates, layout.mesh.shape, strict=True):
        if placement is None:
            index, count = index * size + coordinate, count * size
    return index, count


@lru_cache(maxsize=64)
def holders(shape: tuple[int, ...], layout: Layout, writer: int, box: Box) -> tuple[tuple[int, Box], ...]:
    """Who, of copy number ``writer`` of a tensor, holds something of ``box``: ranks, each with a whole box of its own
    (:func:`local_boxes`) that meets it.

    Takes time by what it finds, whatever the number of ranks.

    Raises:
        InvalidRequest: There is no such copy.
    """
    copies = [size for placement, size in zip(layout.placements, layout.mesh.shape, strict=True) if placement is None]
    if not 0 <= writer < prod(copies):
        raise InvalidRequest(f"there are {prod(copies)} copies, none has number {writer}")
    if 0 in box.sizes:
        return ()
    split = _steps(len(shape), layout)
    lines = [
        runs_of(extent, steps, offset, offset + size, (None,) * len(steps))
        for extent, offset, size, (_, steps) in zip(shape, box.offsets, box.sizes, split, strict=True)
    ]
    counts = [len(line.starts) for line in lines]
    count = prod(counts)
    chosen = np.indices(counts).reshape(len(lines), count)
    # A rank's place in the mesh: its coordinates on what cuts a dimension come from the runs, the others from `writer`.
    place = np.zeros(count, np.int64)
    strides = [prod(layout.mesh.shape[dim + 1 :]) for dim in range(len(layout.mesh.shape))]
    for line, which, (dims, _) in zip(lines, chosen, split, strict=True):
        cells = line.cells[which]
        for dim in reversed(dims):
            cells, coordinate = np.divmod(cells, layout.mesh.shape[dim])
            place += coordinate * strides[dim]
    for dim in reversed(range(len(layout.placements))):
        if layout.placements[dim] is None:
            writer, coordinate_of_copy = divmod(writer, layout.mesh.shape[dim])
            place += coordinate_of_copy * strides[dim]
    offsets = [line.starts[which].tolist() for line, which in zip(lines, chosen, strict=True)]
    sizes = [line.sizes[which].tolist() for line, which in zip(lines, chosen, strict=True)]
    ranks = layout.mesh.ranks
    return tuple(
        (ranks[at], Box(begin, size))
        for at, begin, size in zip(place.tolist(), _rows(offsets, count), _rows(sizes, count), strict=True)
    )


def _rows(columns: list[list[int]], count: int) -> Iterator[tuple[int, ...]]:
    """Columns as ``count`` rows; a tensor without dimensions has rows without numbers."""
    return zip(*columns, strict=True) if columns else iter([()] * count)


def _cut(placement: int | tuple[int, int], ndim: int) -> tuple[int, int]:
    """The dimension, of ``ndim``, that a placement cuts, and its split factor."""
    dim, factor = placement if isinstance(placement, tuple) else (placement, 1)
    if not 0 <= dim < ndim or factor < 1:
        raise InvalidRequest(f"placement {placement} does not fit a tensor of {ndim} dimensions")
    return dim, factor


@lru_cache(maxsize=1024)
def _steps(ndim: int, layout: Layout) -> tuple[tuple[tuple[int, ...], Steps], ...]:
    """For each dimension of a tensor: the dimensions of the mesh that cut it, and how."""
    dims: list[list[int]] = [[] for _ in range(ndim)]
    steps: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    for number, placement in enumerate(layout.placements):
        if placement is None:
            continue
        dim, factor = _cut(placement, ndim)
        dims[dim].append(number)
        steps[dim].append((layout.mesh.shape[number], factor))
    return tuple((tuple(d), tuple(s)) for d, s in zip(dims, steps, strict=True))


@lru_cache(maxsize=16)
def _positions(mesh: Mesh) -> dict[int, int]:
    """Where in the mesh each rank is."""
    return {rank: position for position, rank in enumerate(mesh.ranks)}


def _coordinates(mesh: Mesh, rank: int) -> tuple[int, ...] | None:
    """A rank's coordinates in the mesh, None outside."""
    position = _positions(mesh).get(rank)
    if position is None:
        return None
    coordinates = []
    for size in reversed(mesh.shape):
        position, coordinate = divmod(position, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))
