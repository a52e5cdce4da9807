"""Tensors of a target that a load fills: which chunks go straight into their memory, and what is copied after."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tierload.state.footprints import Footprint, footprint_of
from tierload.state.keys import Path
from tierload.state.memory import Memory
from tierload.state.tensors import is_plain_tensor, is_within_reach, tensor_over
from tierload.state.views import TensorView

__all__ = ["Fill", "Fills", "copy", "obstacle", "untie"]


@dataclass(slots=True, eq=False)
class Fill:
    """One tensor of the target and the view that goes into it: shapes are equal, dtypes too or to be converted."""

    live: torch.Tensor
    view: TensorView
    path: Path

    def footprint(self) -> Footprint:
        """The memory of the live tensor."""
        live = self.live
        if live.is_contiguous():
            return Footprint(live.data_ptr(), live.nbytes, live.nbytes, ((1, live.nbytes),))
        return footprint_of(live.data_ptr(), live.shape, live.stride(), live.element_size())

    @property
    def range(self) -> tuple[int, int]:
        """The addresses of the live tensor's first byte and of the one after its last; it has elements."""
        footprint = self.footprint()
        return footprint.start, footprint.end

    def steps(self) -> set[tuple[int, int]]:
        """For each dimension, its stride in the chunk and in the target, in bytes."""
        rows = zip(self.live.shape, self.view.stride, self.live.stride(), strict=True)
        size, live_size = self.view.row.size, self.live.element_size()
        return {(stored * size, step * live_size) for count, stored, step in rows if count > 1}

    def is_direct(self, nbytes: int) -> bool:
        """Whether the chunk, of ``nbytes`` bytes, can be read right into the live tensor's memory."""
        live, view = self.live, self.view
        if live.dtype is not view.row.torch or view.offset or not is_plain_tensor(live) or not is_within_reach(live):
            return False
        if live.is_neg() != view.neg or (live.dtype.is_complex and live.is_conj() != view.conj):
            return False
        footprint = self.footprint()
        return footprint.dense and not footprint.overlapping and footprint.nbytes == nbytes and _same_steps(live, view)


def obstacle(live: torch.Tensor, view: TensorView) -> str:
    """Why the memory of a live tensor cannot take what is stored, although shapes are equal; empty when it can."""
    if live.is_meta or live.is_contiguous():
        return ""
    steps = zip(live.shape, live.stride(), view.stride, strict=True)
    if any(step == 0 and count > 1 and stored for count, step, stored in steps):
        return "repeats its elements in the target (expand) and not in the store"
    footprint = footprint_of(live.data_ptr(), live.shape, live.stride(), live.element_size())
    if footprint.overlapping and not _same_steps(live, view):
        return "overlaps itself in the target, and not in the same way in the store"
    return ""


def _same_steps(live: torch.Tensor, view: TensorView) -> bool:
    """Whether the strides that matter are equal."""
    if live.stride() == view.stride:
        return True
    steps = zip(live.shape, live.stride(), view.stride, strict=True)
    return all(count == 1 or step == stored for count, step, stored in steps)


def untie(fills: Iterable[Fill]) -> list[tuple[Fill, Fill]]:
    """Pairs of fills that meet in the target's memory but come from different chunks: only one can have it."""
    regions: dict[torch.device, list[tuple[int, int, str, Fill]]] = defaultdict(list)
    for fill in fills:
        if fill.live.numel():
            start = fill.live.data_ptr()
            regions[fill.live.device].append((start, start + fill.footprint().span, fill.path.text(), fill))
    clashes = []
    for region in regions.values():
        region.sort(key=lambda row: row[:3])
        reached, farthest = -1, None
        for start, end, _, fill in region:
            if farthest is not None and start < reached and _disagree(farthest, fill):
                first, second = farthest.footprint(), fill.footprint()
                if first.dense or second.dense or first == second:  # else their elements may alternate
                    clashes.append(tuple(sorted((farthest, fill), key=lambda one: one.path.text())))
            if end > reached:
                reached, farthest = end, fill
    return clashes  # type: ignore[return-value]


def _disagree(fill: Fill, other: Fill) -> bool:
    """Whether two live tensors that meet in memory did not do so, in the same way, when they were saved."""
    view, theirs = fill.view, other.view
    if view.chunk != theirs.chunk:
        return view.apart < 0 or view.apart != theirs.apart
    base, their_base = (one.live.data_ptr() - one.view.offset * one.view.row.size for one in (fill, other))
    if base == their_base and _same_steps(fill.live, view) and _same_steps(other.live, theirs):
        return False
    # Other strides in the target: each step in the chunk must be the same step in memory for both.
    steps = fill.steps() | other.steps()
    alike = view.offset * view.row.size == theirs.offset * theirs.row.size and fill.footprint() == other.footprint()
    return not alike or len(dict(steps)) != len(steps)


class Fills:
    """All fills of one load. ``settle`` decides where every chunk goes; ``copy`` does what is left when it is there."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._copies: list[tuple[Fill, torch.Tensor]] = []
        self._touched: list[torch.Tensor] = []
        self.direct: list[tuple[int, torch.Tensor]] = []  # chunk, and the tensor of the target that it is read into

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors of the target that are filled in another way."""
        self._touched += tensors

    def settle(self, fills: Iterable[Fill]) -> None:
        """Choose a tensor of the target as the destination of each chunk where one suits, else new memory."""
        by_chunk: dict[int, list[Fill]] = defaultdict(list)
        for fill in fills:
            if fill.live.numel():
                by_chunk[fill.view.chunk].append(fill)
                self._touched.append(fill.live)
        for number, users in by_chunk.items():
            nbytes = self._memory.row(number)[0].nbytes
            chosen = None
            if not self._memory.has_tensor(number) and len({fill.view.row.code for fill in users}) == 1:
                chosen = next((fill for fill in users if fill.is_direct(nbytes)), None)
            if chosen is None:
                buffer = self._memory.tensor(number)
                self._copies += [(fill, fill.view.over(buffer)) for fill in users]
                continue
            live = chosen.live
            self.direct.append((number, live))
            for fill in users:
                if fill is chosen or _same_memory(fill.live, live, fill.view, chosen.view):
                    continue
                view = fill.view
                offset = int(live.storage_offset()) + view.offset
                storage = live.untyped_storage()
                source = tensor_over(storage, view.row.torch, offset, view.shape, view.stride, live.device)
                self._copies.append((fill, view.marked(source)))

    def copy(self, chunks: Container[int] | None = None) -> None:
        """Fill the tensors whose bytes were read elsewhere, those of ``chunks`` or of all; and tell autograd that all
        tensors have changed, or will."""
        for fill, source in self._copies:
            if chunks is None or fill.view.chunk in chunks:
                copy(fill, source)
        torch.autograd.graph.increment_version([live for live in self._touched if not live.is_inference()])

    def copies(self) -> dict[int, list[tuple[Fill, torch.Tensor]]]:
        """What is to be copied from where, by the chunk whose bytes it needs."""
        found: dict[int, list[tuple[Fill, torch.Tensor]]] = defaultdict(list)
        for fill, source in self._copies:
            found[fill.view.chunk].append((fill, source))
        return found


def copy(fill: Fill, source: torch.Tensor) -> None:
    """Fill a tensor from memory that has its bytes."""
    with torch.no_grad(), _quiet(fill.live.dtype):
        live = fill.live.detach()
        if fill.view.row.is_shell:
            integers = torch.uint8 if fill.view.row.size == 1 else torch.int16
            live, source = live.view(integers), source.view(integers)
        for dim, (count, step) in enumerate(zip(live.shape, live.stride(), strict=True)):
            if not step and count > 1:
                live, source = live.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        live.copy_(source)


@contextmanager
def _quiet(dtype: torch.dtype) -> Iterator[None]:
    """Without torch's word about halves of complex numbers. Filters of warnings are the whole process's, and copies are
    made beside a training, so they are left alone otherwise."""
    if dtype is not torch.complex32:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


def _same_memory(live: torch.Tensor, other: torch.Tensor, view: TensorView, chosen: TensorView) -> bool:
    """Whether the bytes that are read for ``other`` already are those of ``live``."""
    size = live.element_size()
    return (
        is_within_reach(live)
        and live.dtype is other.dtype
        and live.data_ptr() - view.offset * size == other.data_ptr() - chosen.offset * size
        and _same_steps(live, view)
        and live.is_neg() == view.neg
        and live.is_conj() == view.conj
    )
