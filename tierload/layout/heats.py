"""How hot pages are, by what is known of the tensors in them."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import numpy as np
import numpy.typing as npt

from tierload.layout.pages import PagePlan
from tierload.types import ChunkInfo, HeatTable

__all__ = ["page_heats"]

_LEVELS = 65534
"""Heat 1, less one: 0 is for pages of which none is known (docs/FORMAT.md section 6)."""

_UNKNOWN = -1.0


def page_heats(plan: PagePlan, table: HeatTable) -> npt.NDArray[np.uint16]:
    """The heat of each page of a plan, as manifests have it. A page of several chunks is as hot as the hottest of them;
    rows of a tensor have the heat of the tensor's pages that they lie on."""
    chunks = plan.chunks
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, key in enumerate(chunks.keys_at(range(len(chunks)))):
        numbers[key].append(number)
    whole = np.full(len(chunks), _UNKNOWN)
    first, count, begin = np.zeros((3, len(chunks)), np.int64)  # of the chunk's tensor: its pages in `paged`; the byte
    paged: list[npt.NDArray[np.float32]] = []
    known = 0
    for key, heat in zip(table.keys, table.heat.tolist(), strict=True):
        pages = table.pages.get(key)
        for number in numbers.get(key, ()):
            whole[number] = heat
            if pages is not None and _has_pages(info := chunks.info(number), plan.sizes[0], len(pages)):
                first[number], count[number], begin[number] = known, len(pages), _begin(info)
                paged.append(pages)
                known += len(pages)
    of_part = whole[plan.owners]
    parts = np.flatnonzero(count[plan.owners])
    if len(parts):
        owners = plan.owners[parts]
        at = (begin[owners] + (plan.starts + plan.part_offsets)[parts].astype(np.int64)) // plan.sizes[0]
        of_part[parts] = np.concatenate(paged)[first[owners] + at]
    hottest = np.full(len(plan.parts_of_page), _UNKNOWN)
    np.maximum.at(hottest, np.repeat(np.arange(len(hottest)), plan.parts_of_page), of_part)
    heats = np.where(hottest < 0, 0, np.rint(hottest.clip(0, 1) * _LEVELS) + 1)
    return heats.astype(np.uint16)


def _has_pages(info: ChunkInfo, page_bytes: int, count: int) -> bool:
    """Whether these are the pages that a chunk, or the tensor that it is some rows of, is cut into."""
    rows = info.sizes[1:] == info.shape[1:]
    return rows and -(-info.nbytes * prod(info.shape) // max(prod(info.sizes), 1) // page_bytes) == count


def _begin(info: ChunkInfo) -> int:
    """The byte of the whole tensor that a chunk of some of its rows begins with."""
    return info.offsets[0] * (info.nbytes // info.sizes[0]) if info.sizes and info.sizes[0] else 0
