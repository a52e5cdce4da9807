"""In which order pages are placed in segments: the hottest first, as a step uses them, then what else it uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierload.layout.heats import page_heats
from tierload.layout.pages import PagePlan
from tierload.settings import hot_bytes
from tierload.types import HeatTable

__all__ = ["Placement", "place_pages"]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Placement:
    """``order`` has the number of every page once, the first to be placed first; the first ``hot`` of them are hot.
    ``heats`` are those of the pages, in the order of the plan, as manifests have them."""

    heats: npt.NDArray[np.uint16]
    order: npt.NDArray[np.uint32]
    hot: int


def place_pages(plan: PagePlan, table: HeatTable, budget_bytes: int) -> Placement:
    """Where the pages of a plan go, of which a step uses some, and some are hot.

    Hot are the hottest pages, as many as have ``budget_bytes`` raw bytes in all (0: a quarter of the plan's). They come
    first, in the order in which a step first uses them, those that it does not use behind the others; then the rest of
    what a step uses, in that order; then all else, as planned. Of pages that are used at the same time, and of equally
    hot ones, the first planned comes first. A page of several chunks is used with the first of them.
    """
    heats, uses = page_heats(plan, table), _first_uses(plan, table)
    sizes = np.zeros(len(uses), np.int64)
    np.add.at(sizes, _page_of_part(plan), plan.lengths.astype(np.int64))
    pages = np.arange(len(uses))
    hottest = np.lexsort((pages, uses, -heats.astype(np.int64)))
    reach = hot_bytes(budget_bytes, int(sizes.sum()))
    hot = np.zeros(len(uses), np.bool_)
    hot[hottest[np.cumsum(sizes[hottest]) <= reach]] = True
    hot &= heats > 0
    used = uses < _NEVER
    turns = np.where(hot | used, uses, 0)
    order = np.lexsort((pages, turns, np.where(hot, 0, np.where(used, 1, 2))))
    return Placement(heats, order.astype(np.uint32), int(hot.sum()))


def _first_uses(plan: PagePlan, table: HeatTable) -> npt.NDArray[np.int64]:
    """How many tensors a step uses before each page; _NEVER where it does not use the page, as far as is known."""
    chunks = plan.chunks
    known = dict(zip(table.keys, table.first_use.tolist(), strict=True))
    of_chunk = np.array([known.get(key, -1) for key in chunks.keys_at(range(len(chunks)))], np.int64)
    of_chunk[of_chunk < 0] = _NEVER
    uses = np.full(len(plan.parts_of_page), _NEVER)
    np.minimum.at(uses, _page_of_part(plan), of_chunk[plan.owners])
    return uses


def _page_of_part(plan: PagePlan) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(plan.parts_of_page)), plan.parts_of_page)
