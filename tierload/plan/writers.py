"""Who writes what all ranks have: each row of a replicated tensor once, and no rank much more than the others.

The plan follows from its arguments alone, in whole numbers where it counts, so every rank comes to the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierload.plan.meshes import local_elements
from tierload.types import Layout

__all__ = ["Cost", "Explanation", "Item", "Part", "assign_writers", "explain"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Item:
    """A value that several ranks have: ``nbytes`` in all, ``rows`` of ``row_bytes``, the least that can be cut off.

    ``replicas_of`` None: the same on all ranks of the world. Else the copies are those of a tensor of ``shape`` that is
    spread over a mesh, and a rank has its shard.
    """

    key: str
    nbytes: int
    rows: int
    row_bytes: int
    replicas_of: Layout | None = None
    shape: tuple[int, ...] = ()


class Part(NamedTuple):
    """Rows of an item that one replica writes: a rank of the world, or a copy (all its ranks, each its shard)."""

    begin_row: int
    end_row: int
    replica: int


class Cost(NamedTuple):
    """What a plan costs: parts beyond one an item, over the items; the heaviest rank's bytes over the mean; weighed."""

    communication: float
    load: float
    objective: float


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A plan in numbers: for each rank the bytes (fixed ones too) and parts that it writes; and what the plan costs,
    ``before`` cuts were moved to where items begin or end, and ``after``."""

    nbytes: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    before: Cost
    after: Cost


def assign_writers(
    items: Sequence[Item], ranks: int, fixed_bytes: npt.NDArray[np.int64] | None, page_bytes: int, alpha: float
) -> list[tuple[Part, ...]]:
    """Which replica writes which rows of each item, for a world of ``ranks``; ``items`` are in the order of keys.

    What is smaller than a page is replica 0's, where it is packed. Other plain items form one line of bytes, of which
    each rank takes a run, as long as brings it level with the others; ``fixed_bytes`` are what each rank writes besides
    (None: nothing). Runs are cut at the rows nearest to page boundaries. Then cuts are moved to where an item begins
    while ``alpha`` · communication + (1 - ``alpha``) · load falls and no rank gets more than the heaviest had. A spread
    tensor is one copy's, larger ones first, each the copy's whose ranks have the least.
    """
    return _Planning(items, ranks, fixed_bytes, page_bytes, alpha).parts


def explain(
    items: Sequence[Item], ranks: int, fixed_bytes: npt.NDArray[np.int64] | None, page_bytes: int, alpha: float
) -> Explanation:
    """What :func:`assign_writers` plans for the same arguments, in numbers."""
    planning = _Planning(items, ranks, fixed_bytes, page_bytes, alpha)
    return Explanation(planning.loads, planning.count_parts(), planning.before, planning.after)


class _Planning:
    """One plan in the making: ``loads`` are the bytes of each rank so far."""

    def __init__(
        self, items: Sequence[Item], ranks: int, fixed_bytes: _Ints | None, page_bytes: int, alpha: float
    ) -> None:
        self._items, self._alpha = items, alpha
        self.loads = np.zeros(ranks, np.int64) if fixed_bytes is None else fixed_bytes.astype(np.int64)
        self.parts: list[tuple[Part, ...]] = [(Part(0, item.rows, 0),) for item in items]
        plain = [number for number, item in enumerate(items) if item.replicas_of is None]
        large = [number for number in plain if items[number].nbytes >= page_bytes]
        self.loads[0] += sum(items[number].nbytes for number in plain) - sum(items[number].nbytes for number in large)
        self._choose_copies()
        line = _Line(np.array(large, np.int64), *_columns([items[number] for number in large]))
        shares = _level(self.loads, line.nbytes)
        cuts = line.snapped(np.cumsum(shares)[:-1], page_bytes)
        self.loads += np.diff(cuts, prepend=0, append=line.nbytes)
        self._extra = line.inside(cuts)
        self.before = self._cost(self._extra, int(self.loads.max()))
        self._move_cuts(line, cuts)
        self.after = self._cost(self._extra, int(self.loads.max()))
        for number, parts in line.parts(cuts):
            self.parts[number] = parts

    def _choose_copies(self) -> None:
        """Gives each spread tensor to the copy whose heaviest rank has the least."""
        spread = [(item.nbytes, number, item.replicas_of) for number, item in enumerate(self._items)]
        for nbytes, number, layout in sorted(spread, key=lambda one: (-one[0], one[1])):
            if layout is None:
                continue
            ranks, elements = _copies(layout), _shards(self._items[number].shape, layout)
            loads = self.loads[ranks] + elements * (nbytes // max(prod(self._items[number].shape), 1))
            copy = int(np.lexsort((loads.sum(axis=1), loads.max(axis=1)))[0])
            self.loads[ranks[copy]] = loads[copy]
            self.parts[number] = (Part(0, self._items[number].rows, copy),)

    def _cost(self, extra: int, heaviest: int) -> Cost:
        communication = extra / max(len(self._items), 1)
        total = int(self.loads.sum())
        load = heaviest * len(self.loads) / total if total else 1.0
        return Cost(communication, load, self._alpha * communication + (1 - self._alpha) * load)

    def _move_cuts(self, line: _Line, cuts: _Ints) -> None:
        """Moves cuts to where their item begins or ends, the shortest ways first: that makes a part less."""
        most, cost = int(self.loads.max()), self.before
        moved = set()
        for first, last, by in line.moves(cuts):
            # Between equal cuts are ranks that have nothing of the line: the cuts move as one.
            gains = first if by > 0 else last + 1
            if first in moved or self.loads[gains] + abs(by) > most:
                continue
            self.loads[[first, last + 1]] += (by, -by)
            new = self._cost(self._extra - 1, int(self.loads.max()))
            if new.objective < cost.objective:
                cuts[first : last + 1] += by
                cost, self._extra = new, self._extra - 1
                moved.add(first)
            else:
                self.loads[[first, last + 1]] -= (by, -by)

    def count_parts(self) -> _Ints:
        """How many parts each rank writes."""
        counts = np.zeros(len(self.loads), np.int64)
        for item, parts in zip(self._items, self.parts, strict=True):
            if item.replicas_of is None:
                np.add.at(counts, [part.replica for part in parts], 1)
            else:
                held = _shards(item.shape, item.replicas_of) > 0
                counts[_copies(item.replicas_of)[parts[0].replica][held]] += 1
        return counts


class _Line:
    """Large plain items end to end: a cut is a position in their bytes, that of rank r ends its run."""

    def __init__(self, numbers: _Ints, sizes: _Ints, rows: _Ints, row_bytes: _Ints) -> None:
        self._numbers, self._rows, self._row_bytes = numbers, rows, row_bytes
        self._ends = np.cumsum(sizes)
        self._begins = self._ends - sizes
        self.nbytes = int(sizes.sum())

    def _item(self, cuts: _Ints) -> _Ints:
        """The number on the line of the item that each cut is in, or begins."""
        after: _Ints = np.searchsorted(self._begins, cuts, side="right")
        return after - 1

    def snapped(self, cuts: _Ints, page_bytes: int) -> _Ints:
        """Cuts at the rows that are nearest to the page boundaries that are nearest to them."""
        if not self.nbytes:
            return cuts
        item = self._item(cuts)
        row_bytes, within = self._row_bytes[item], cuts - self._begins[item]
        # Rows of a page and more have a page boundary near enough wherever they begin.
        within = np.where(row_bytes < page_bytes, (within + page_bytes // 2) // page_bytes * page_bytes, within)
        row: _Ints = np.minimum((within + row_bytes // 2) // row_bytes, self._rows[item])
        return self._begins[item] + row * row_bytes

    def inside(self, cuts: _Ints) -> int:
        """How many different cuts are within an item, each making a part more."""
        return len(np.setdiff1d(cuts, np.append(self._begins, self.nbytes)))

    def moves(self, cuts: _Ints) -> list[tuple[int, int, int]]:
        """Ways to take a cut out of an item without passing another: the first and last of the equal cuts that go, and
        by how many bytes; the shortest first."""
        where = np.setdiff1d(cuts, np.append(self._begins, self.nbytes))
        item = self._item(where)
        lowest, highest = np.diff(item, prepend=-1) > 0, np.diff(item, append=len(self._begins)) > 0
        at = np.concatenate([where[lowest], where[highest]])
        by = np.concatenate([self._begins[item[lowest]] - where[lowest], self._ends[item[highest]] - where[highest]])
        first, last = np.searchsorted(cuts, at, side="left"), np.searchsorted(cuts, at, side="right") - 1
        order = np.lexsort((first, np.abs(by)))
        return list(zip(first[order].tolist(), last[order].tolist(), by[order].tolist(), strict=True))

    def parts(self, cuts: _Ints) -> Iterator[tuple[int, tuple[Part, ...]]]:
        """For each item its number and its parts."""
        begins = np.union1d(self._begins, cuts[cuts < self.nbytes])
        item, ends = self._item(begins), np.append(begins[1:], self.nbytes)
        first_rows = (begins - self._begins[item]) // self._row_bytes[item]
        end_rows = (ends - self._begins[item]) // self._row_bytes[item]
        writers = np.searchsorted(cuts, begins, side="right")
        columns = (first_rows.tolist(), end_rows.tolist(), writers.tolist())
        parts = [Part(*row) for row in zip(*columns, strict=True)]
        edges = [*np.searchsorted(item, np.arange(len(self._numbers))).tolist(), len(parts)]
        for which, number in enumerate(self._numbers.tolist()):
            yield number, tuple(parts[edges[which] : edges[which + 1]])


def _columns(items: list[Item]) -> tuple[_Ints, _Ints, _Ints]:
    """Bytes, rows and bytes of a row of each item."""
    table = np.array([(item.nbytes, item.rows, item.row_bytes) for item in items], np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _level(loads: _Ints, nbytes: int) -> _Ints:
    """How many of ``nbytes`` each rank takes so that the heaviest of those that take some is as light as can be."""
    order = np.argsort(loads, kind="stable")
    held = np.cumsum(loads[order])
    counts = np.arange(1, len(loads) + 1)
    # The lightest k are raised to one level, the largest k that the bytes suffice for.
    takers = int(np.flatnonzero(loads[order] * counts - held <= nbytes)[-1]) + 1
    level, rest = divmod(int(held[takers - 1]) + nbytes, takers)
    shares = np.zeros(len(loads), np.int64)
    shares[order[:takers]] = level - loads[order[:takers]]
    shares[order[:rest]] += 1
    return shares


@lru_cache(maxsize=16)
def _copies(layout: Layout) -> _Ints:
    """The ranks of each copy, one a row, in the order of the shards."""
    return _by_copy(np.array(layout.mesh.ranks, np.int64).reshape(layout.mesh.shape), layout)


@lru_cache(maxsize=256)
def _shards(shape: tuple[int, ...], layout: Layout) -> _Ints:
    """The elements of each shard of a copy."""
    return np.array(_by_copy(local_elements(shape, layout), layout)[0])


def _by_copy(grid: _Ints, layout: Layout) -> _Ints:
    """An array of the mesh's shape with one copy a row."""
    copies = [dim for dim, placement in enumerate(layout.placements) if placement is None]
    shards = [dim for dim, placement in enumerate(layout.placements) if placement is not None]
    count = prod(grid.shape[dim] for dim in copies)
    return grid.transpose([*copies, *shards]).reshape(count, -1)
