"""What two boxes of a tensor share, as runs of bytes: from what was stored to where it is wanted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierload.plan.meshes import LocalBox
from tierload.types import Box

__all__ = ["copies", "overlap"]


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None when that is nothing."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = [
        min(begin_a + size_a, begin_b + size_b)
        for begin_a, size_a, begin_b, size_b in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    ]
    sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def copies(
    stored: Box, target: LocalBox, strides: tuple[int, ...], item_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The runs of bytes that go from a stored box to a local tensor: where from, where to, and their lengths.

    Sources are offsets in the stored box's own row-major bytes, in ascending order. Destinations are offsets from the
    first element of the local tensor that ``target`` lies in, whose ``strides`` are in bytes. Runs that follow one
    another on both sides are one.
    """
    shared = overlap(stored, target.box)
    if shared is None:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    source = destination = 0
    length = step = item_bytes
    steps: list[tuple[int, int, int]] = []  # size and both strides of what is not in one run, innermost first
    for dim in reversed(range(len(shared.sizes))):
        size, stride = shared.sizes[dim], strides[dim]
        source += (shared.offsets[dim] - stored.offsets[dim]) * step
        destination += (shared.offsets[dim] - target.box.offsets[dim] + target.at[dim]) * stride
        if not steps and step == stride == length:
            length *= size
        elif size > 1:
            steps.append((size, step, stride))
        step *= stored.sizes[dim]
    sources, destinations = np.array([source]), np.array([destination])
    for size, step, stride in steps:
        along = np.arange(size)[:, None]
        sources, destinations = (along * step + sources).reshape(-1), (along * stride + destinations).reshape(-1)
    return sources, destinations, np.full(len(sources), length)
