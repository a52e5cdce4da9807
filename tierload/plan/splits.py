"""One dimension of a tensor, cut among ranks again and again as torch.chunk cuts: who gets which runs of it.

In closed form: what is asked for is found without a look at what other ranks get.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Runs", "Steps", "extents_after", "runs_of"]

Ints = npt.NDArray[np.int64]
Steps = tuple[tuple[int, int], ...]  # ranks and split factor of each cut of one dimension, in the order of the mesh


class Runs(NamedTuple):
    """Runs of one dimension of a tensor: where each begins and how long it is, in the whole and (``at``) in the local
    dimension, ``extents`` long, of the ranks that hold it: those whose coordinates are ``cells``, row-major."""

    starts: Ints
    sizes: Ints
    at: Ints
    extents: Ints
    cells: Ints


def runs_of(extent: int, steps: Steps, begin: int, end: int, only: tuple[int | None, ...]) -> Runs:
    """The runs that meet [begin, end), of the ranks with the coordinates ``only`` (None: any)."""
    begin, end = max(begin, 0), min(end, extent)
    one = np.ones(1 if begin < end else 0, np.int64)
    runs = Runs(one * 0, one * extent, one * 0, one * extent, one * 0)
    for (ranks, factor), coordinate in zip(steps, only, strict=True):
        runs = _split(runs, ranks, factor, begin, end, coordinate)
    return runs


def _split(runs: Runs, ranks: int, factor: int, begin: int, end: int, only: int | None) -> Runs:
    """Cuts the local dimensions that runs lie in as torch.chunk does, into ``factor`` and each of these into ``ranks``,
    of which rank i gets the i-th of each."""
    # What would be cut into single elements, or for one rank, stays in one run of the first rank.
    whole = (runs.extents <= factor) | (ranks == 1)
    outer = np.where(whole, runs.extents, -(-runs.extents // factor))
    low = runs.at + np.maximum(begin - runs.starts, 0)
    high = runs.at + np.minimum(end - runs.starts, runs.sizes)
    run, chunk = _ranges(low // outer, (high - 1) // outer)
    whole, outer, extents = whole[run], outer[run], runs.extents[run]
    base = chunk * outer
    length = np.minimum(outer, extents - base)
    inner = np.where(whole, length, -(-length // ranks))
    first = np.maximum(low[run] - base, 0) // inner
    last = (np.minimum(high[run] - base, length) - 1) // inner
    if only is not None:
        first, last = np.maximum(first, only), np.minimum(last, only)
    which, part = _ranges(first, last)
    run, chunk, base, outer, extents = run[which], chunk[which], base[which], outer[which], extents[which]
    starts = np.maximum(runs.at[run] - base, part * inner[which])
    stops = np.minimum(runs.at[run] + runs.sizes[run] - base, np.minimum((part + 1) * inner[which], length[which]))
    return Runs(
        starts=runs.starts[run] + base + starts - runs.at[run],
        sizes=stops - starts,
        at=chunk * _share(outer, ranks, part) + starts - part * inner[which],
        extents=extents_after(extents, ranks, factor, part),
        cells=runs.cells[run] * ranks + part,
    )


def _ranges(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The numbers from ``first[i]`` to ``last[i]``, for each i, and before them the i that each belongs to."""
    counts = np.maximum(last - first + 1, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - first, counts)


def _share(length: Ints, ranks: int, part: Ints | int) -> Ints:
    """How much of ``length`` part number ``part`` is when torch.chunk cuts it for ``ranks``."""
    each = -(-length // ranks)
    share: Ints = np.clip(length - part * each, 0, each)
    return share


def extents_after(extents: Ints, ranks: int, factor: int, part: Ints | int) -> Ints:
    """How long local dimensions are once they are cut, on the ranks that get ``part``."""
    outer = np.maximum(-(-extents // factor), 1)
    return extents // outer * _share(outer, ranks, part) + _share(extents % outer, ranks, part)
