"""What an index takes of a tensor: a box, or boxes of rows, and the index that is then left to be done on them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierload.types import Box

__all__ = ["Cutout", "cutout_of"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(slots=True)
class Cutout:
    """``boxes`` of a tensor, which lie one after the other along its first dimension in a tensor of ``sizes``; of that
    one, ``index`` takes what was asked for."""

    boxes: list[Box]
    sizes: tuple[int, ...]
    index: tuple[Any, ...]


def cutout_of(index: object, shape: Sequence[int]) -> Cutout | None:
    """What ``index`` takes of a tensor of this shape; None where that cannot be told from the index alone.

    Raises:
        IndexError: It leaves the tensor.
    """
    items = _expanded(index, len(shape))
    if items is None:
        return None
    spans: list[tuple[int, int]] = []
    rows: torch.Tensor | None = None
    left: list[Any] = []
    for item in items:
        dim = len(spans)
        if item is None:
            left.append(None)
        elif isinstance(item, slice):
            begin, stop, step = item.indices(shape[dim])
            if step <= 0:
                return None  # torch has none, and says so
            count = len(range(begin, stop, step))
            spans.append((begin, begin + (count - 1) * step + 1 if count else begin))
            left.append(slice(None, None, step))
        elif isinstance(item, torch.Tensor) and item.dtype is torch.bool:
            spans += [(0, size) for size in shape[dim : dim + item.dim()]]
            left.append(item)
        elif isinstance(item, torch.Tensor):
            places = _places(item, shape[dim], dim)
            if dim == 0:
                rows, places = torch.unique(places, return_inverse=True)
                spans.append((0, shape[0]))
            else:
                begin, end = (int(places.min()), int(places.max()) + 1) if places.numel() else (0, 0)
                spans.append((begin, end))
                places = places - begin
            left.append(places)
        else:
            begin = _place(item, shape[dim], dim)
            spans.append((begin, begin + 1))
            left.append(0)
    box = Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))
    if rows is None:
        return Cutout([box], box.sizes, tuple(left))
    boxes = [Box((begin, *box.offsets[1:]), (count, *box.sizes[1:])) for begin, count in _runs(rows)]
    return Cutout(boxes, (len(rows), *box.sizes[1:]), tuple(left))


def _expanded(index: object, ndim: int) -> list[Any] | None:
    """An index with something for each dimension: None, slices, integers, and tensors of integers or truth values."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, (list, np.ndarray)):
            try:
                item = torch.as_tensor(item)
            except (TypeError, ValueError, RuntimeError):
                return None
        if isinstance(item, (bool, np.bool_)):
            return None
        if isinstance(item, torch.Tensor):
            item = item.detach().cpu()
            if item.dtype is not torch.bool and item.dtype not in _INTEGERS:
                return None
        elif not (item is None or item is Ellipsis or isinstance(item, slice) or hasattr(item, "__index__")):
            return None
        items.append(item)
    taken = sum(_dims(item) for item in items)
    if taken > ndim:
        raise IndexError(f"too many indices: {taken} for a tensor of {ndim} dimensions")
    gaps = [number for number, item in enumerate(items) if item is Ellipsis]
    if len(gaps) > 1:
        return None
    gap = gaps[0] if gaps else len(items)
    return [*items[:gap], *[slice(None)] * (ndim - taken), *items[gap + 1 :]]


def _dims(item: object) -> int:
    """How many dimensions of the tensor it takes."""
    if isinstance(item, torch.Tensor) and item.dtype is torch.bool:
        return item.dim()
    return 0 if item is None or item is Ellipsis else 1


def _place(item: Any, size: int, dim: int) -> int:
    place = operator.index(item)
    if not -size <= place < size:
        raise IndexError(f"index {place} is out of range for dimension {dim} of size {size}")
    return place % size


def _places(item: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    places = item.long()
    if places.numel():
        _place(int(places.min()), size, dim)
        _place(int(places.max()), size, dim)
    return torch.where(places < 0, places + size, places)


def _runs(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Rows in ascending order as runs: the first one, and how many."""
    numbers = rows.numpy()
    begins = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    counts = np.diff(begins, append=len(numbers))
    return list(zip(numbers[begins].tolist(), counts.tolist(), strict=True))
