"""Which bytes of memory a strided view covers. Pure arithmetic over addresses, shapes and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Footprint", "contiguous_strides", "footprint_of"]

_SPREAD_MAX = 2
"""A view that overlaps itself is stored as the range that it covers while that is at most this many times its size."""


class Footprint(NamedTuple):
    """The bytes that a view touches, whatever the order of its dimensions.

    ``dims`` are ``(stride, size)`` in bytes, largest stride first, without those of stride 0 or size 1, and merged
    where one continues another; the last is the innermost run of adjacent bytes, ``(1, length)``. Views of the same
    elements (a matrix and its transpose) have equal footprints. ``start`` is the first byte's address, ``span`` the
    length of the range from the first byte to the last. A view that meets elements several times (beyond stride 0)
    is ``overlapping``: the whole range stands for it, unless it is ``scattered``, over a range much larger than itself.
    ``nbytes`` counts each byte once.
    """

    start: int
    span: int
    nbytes: int
    dims: tuple[tuple[int, int], ...]
    overlapping: bool = False
    scattered: bool = False

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.start + self.span

    @property
    def dense(self) -> bool:
        """Whether every byte of the range is touched, or the range may stand for the view."""
        return self.span == self.nbytes and not self.scattered


def footprint_of(start: int, shape: Sequence[int], stride: Sequence[int], size: int) -> Footprint:
    """The footprint of a view with elements of ``size`` bytes; ``shape`` and ``stride`` are in elements."""
    dims = sorted(
        ((step * size, count) for step, count in zip(stride, shape, strict=True) if step and count > 1), reverse=True
    )
    merged: list[tuple[int, int]] = [(1, size)]
    extent, overlaps = size, False
    for step, count in reversed(dims):
        inner_step, inner_count = merged[-1]
        overlaps = overlaps or step < extent
        if step == inner_step * inner_count and not overlaps:
            merged[-1] = (inner_step, inner_count * count)
        else:
            merged.append((step, count))
        extent += step * (count - 1)
    nbytes = math.prod(count for _, count in merged)
    merged.reverse()
    if not overlaps:
        return Footprint(start, extent, nbytes, tuple(merged))
    if extent <= _SPREAD_MAX * nbytes:
        return Footprint(start, extent, extent, ((1, extent),), overlapping=True)
    return Footprint(start, extent, nbytes, tuple(merged), overlapping=True, scattered=True)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives a contiguous tensor."""
    strides, step = [], 1
    for count in reversed(shape):
        strides.append(step)
        step *= max(count, 1)
    return tuple(reversed(strides))
