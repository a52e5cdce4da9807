"""Which rank holds which boxes of a tensor that is spread over a mesh of ranks: docs/FORMAT.md section 8."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from .report import Damage

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its sizes
Runs = list[tuple[int, int]]  # of one dimension: where each begins, and how long it is


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """What lies between two places of the dimension that runs make up, laid end to end."""
    found, at = Runs(), 0
    for start, count in runs:
        low, high = max(begin - at, 0), min(end - at, count)
        found += [(start + low, high - low)] if low < high else []
        at += count
    return found


def _dealt(runs: Runs, split: int, size: int, place: int) -> Runs:
    """What the rank at `place` of `size` gets of a dimension that is cut into `split` parts, and each of these for all
    ranks."""
    total, found = sum(count for _, count in runs), Runs()
    outer = max(-(-total // split), 1)
    for begin in range(0, total, outer):
        length = min(outer, total - begin)
        each = -(-length // size)
        for start, count in _cut(runs, begin + min(place * each, length), begin + min((place + 1) * each, length)):
            if found and sum(found[-1]) == start:
                found[-1] = found[-1][0], found[-1][1] + count
            else:
                found.append((start, count))
    return found


def spread_boxes(shape: list[int], mesh: list[Any], placements: list[Any], replica: int) -> Iterator[tuple[int, Box]]:
    """The boxes of one replica: rank, and box."""
    sizes, ranks, *_ = mesh
    if len(placements) != len(sizes) or math.prod(sizes) != len(ranks):
        raise Damage(f"placements {placements} on a mesh of shape {sizes} with {len(ranks)} ranks")
    copied = [dim for dim, placement in enumerate(placements) if placement is None]
    for rank, place in zip(ranks, itertools.product(*map(range, sizes)), strict=True):
        index = 0
        for dim in copied:
            index = index * sizes[dim] + place[dim]
        if index != replica:
            continue
        held = [[(0, extent)] for extent in shape]
        for placement, size, at in zip(placements, sizes, place, strict=True):
            if placement is not None:
                dim, split = placement if isinstance(placement, list) else (placement, 1)
                held[dim] = _dealt(held[dim], split, size, at)
        for runs in itertools.product(*held):
            yield rank, (tuple(begin for begin, _ in runs), tuple(count for _, count in runs))
