"""A large parameter page by page: each page's part of what is known of the whole."""

from __future__ import annotations

import torch

__all__ = ["page_locality", "page_shares"]


def page_shares(moment: torch.Tensor, elements: int) -> list[float]:
    """Each page's part of the sum of squared gradients that the optimizer averages; a page has so many ``elements``."""
    flat = moment.detach().reshape(-1)
    whole = len(flat) // elements * elements
    sums = flat[:whole].view(-1, elements).sum(1, dtype=torch.float32)
    if whole < len(flat):
        sums = torch.cat([sums, flat[whole:].sum(dtype=torch.float32)[None]])
    total = sums.sum()
    even = torch.full_like(sums, 1 / len(sums))
    shares: list[float] = torch.where(total.isfinite() & (total > 0), sums / total, even).tolist()
    return shares


def page_locality(rows: torch.Tensor, row_elements: int, elements: int) -> list[float]:
    """How often each page is used in a step: as often as the most used of the rows that lie in it."""
    total = len(rows) * row_elements
    starts = range(0, total, elements)
    return [
        float(rows[start // row_elements : -(-min(start + elements, total) // row_elements)].max()) for start in starts
    ]
