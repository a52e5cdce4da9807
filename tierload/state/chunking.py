"""Which tensors share a chunk: an O(n log n) sweep over the memory that they cover.

Tensors whose memory does not meet get a chunk each. Tensors over the same elements share one, whatever their shape
and order of dimensions. Overlapping ones share the range that they cover together, stored once; only where that
range is much larger than the tensors (a few elements of a huge buffer) is each stored by itself.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from tierload.state.dtypes import UINT8, DType
from tierload.state.footprints import Footprint, contiguous_strides
from tierload.state.tensors import TensorLeaf, device_of, is_within_reach, physical, tensor_over

__all__ = ["Chunk", "View", "chunks_of"]

_COVER_MAX = 2
"""Overlapping views with gaps share their covered range while it is at most this many times their own bytes."""

_ALIGN_MAX = 16


@dataclass(slots=True)
class View:
    """How a tensor lies in its chunk: ``offset`` and ``stride`` in elements of the tensor's dtype."""

    leaf: TensorLeaf
    offset: int
    stride: tuple[int, ...]


@dataclass(slots=True)
class Chunk:
    """Bytes to store once, and the tensors that are views of them. ``sizes`` is the shape in memory order; ``strides``,
    in bytes, say how elements lie that are not together, which is so in the processor's memory only; ``device`` is the
    accelerator that ``pointer`` is an address of (0: none).

    Chunks with the same ``apart`` (an object) hold parts of the same memory. A contiguous tensor whose memory the core
    reaches, and that shares it with no other, is a chunk by itself: a ``TensorLeaf``.
    """

    row: DType
    sizes: tuple[int, ...]
    pointer: int
    nbytes: int
    owner: object
    views: list[View] = field(default_factory=list)
    strides: tuple[int, ...] = ()
    apart: object = None
    device: int = 0

    @property
    def key(self) -> str:
        """The first key in byte order, which for UTF-8 is that of the code points."""
        return min(view.leaf.key for view in self.views)


def chunks_of(leaves: Iterable[TensorLeaf], notes: list[str]) -> list[Chunk | TensorLeaf]:
    """The chunks of all tensors of a state; remarks for the user go to ``notes``."""
    chunks: list[Chunk | TensorLeaf] = []
    empty: dict[int, Chunk] = {}
    regions: dict[object, list[tuple[int, int, int, TensorLeaf]]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        if 0 in leaf.shape:
            chunk = empty.get(id(leaf.tensor))
            if chunk is None:
                chunk = empty[id(leaf.tensor)] = Chunk(leaf.row, leaf.shape, 0, 0, leaf.tensor)
                chunks.append(chunk)
            chunk.views.append(View(leaf, 0, leaf.stride))
            continue
        start, end = leaf.range
        memory = "" if leaf.is_within_reach else (str(leaf.tensor.device), leaf.tensor.untyped_storage().data_ptr())
        regions[memory].append((start, end, number, leaf))
    for region in regions.values():
        region.sort()
        cluster: list[TensorLeaf] = []
        reached = -1
        for start, end, _, leaf in region:
            if start >= reached and cluster:
                _close(cluster, chunks, notes)
                cluster = []
            cluster.append(leaf)
            reached = max(reached, end)
        _close(cluster, chunks, notes)
    return chunks


def _close(cluster: list[TensorLeaf], chunks: list[Chunk | TensorLeaf], notes: list[str]) -> None:
    """Add the chunks of tensors whose ranges are connected."""
    first = len(chunks)
    _divide(cluster, chunks, notes)
    if len(chunks) > first + 1:
        for chunk in chunks[first:]:
            assert isinstance(chunk, Chunk)  # a leaf is the only one of its cluster
            chunk.apart = cluster


def _divide(cluster: list[TensorLeaf], chunks: list[Chunk | TensorLeaf], notes: list[str]) -> None:
    if len(cluster) == 1 and cluster[0].contiguous and cluster[0].is_within_reach:
        chunks.append(cluster[0])
        return
    dense: list[tuple[Footprint, TensorLeaf]] = []
    gapped: dict[tuple[object, ...], list[tuple[Footprint, TensorLeaf]]] = defaultdict(list)
    for leaf in cluster:
        footprint = leaf.footprint()
        if footprint.scattered:
            chunks.append(_copied(footprint, [leaf], notes))
        elif footprint.dense:
            dense.append((footprint, leaf))
        else:
            gapped[footprint.start, footprint.dims].append((footprint, leaf))
    spans = _Spans(dense)
    loose = [users for users in gapped.values() if not spans.adopt(users)]
    for group in _groups(spans.spans, loose):
        _close_group(group, chunks, notes)


@dataclass(slots=True)
class _Span:
    """A range of memory, every byte of which is stored, or (``users`` of one footprint with gaps) part of it."""

    start: int
    end: int
    nbytes: int
    users: list[TensorLeaf]
    gaps: Footprint | None = None


class _Spans:
    """Dense views of one cluster, merged where they overlap, in order of address."""

    def __init__(self, dense: Sequence[tuple[Footprint, TensorLeaf]]) -> None:
        self.spans: list[_Span] = []
        for footprint, leaf in sorted(dense, key=lambda item: item[0].start):
            if self.spans and footprint.start < self.spans[-1].end:
                last = self.spans[-1]
                last.end = max(last.end, footprint.end)
                last.nbytes = last.end - last.start
                last.users.append(leaf)
            else:
                self.spans.append(_Span(footprint.start, footprint.end, footprint.span, [leaf]))
        self._starts = [span.start for span in self.spans]

    def adopt(self, users: Sequence[tuple[Footprint, TensorLeaf]]) -> bool:
        """Add views with gaps to the span that holds all of their range; whether there is one."""
        footprint = users[0][0]
        at = bisect.bisect_right(self._starts, footprint.start) - 1
        if at < 0 or footprint.end > self.spans[at].end:
            return False
        self.spans[at].users.extend(leaf for _, leaf in users)
        return True


def _groups(spans: list[_Span], loose: Iterable[list[tuple[Footprint, TensorLeaf]]]) -> Iterable[list[_Span]]:
    """Spans and views with gaps, connected where their ranges overlap."""
    items = spans + [
        _Span(users[0][0].start, users[0][0].end, users[0][0].nbytes, [leaf for _, leaf in users], users[0][0])
        for users in loose
    ]
    items.sort(key=lambda span: (span.start, span.end))
    group: list[_Span] = []
    reached = -1
    for item in items:
        if item.start >= reached and group:
            yield group
            group = []
        group.append(item)
        reached = max(reached, item.end)
    if group:
        yield group


def _close_group(group: list[_Span], chunks: list[Chunk | TensorLeaf], notes: list[str]) -> None:
    start, end = group[0].start, max(span.end for span in group)
    if len(group) > 1 and end - start <= _COVER_MAX * sum(span.nbytes for span in group):
        users = [leaf for span in group for leaf in span.users]
        group = [_Span(start, end, end - start, users)]
    elif len(group) > 1:
        keys = sorted(leaf.key for span in group for leaf in span.users)
        notes.append(
            f"{len(keys)} tensors ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}) are small parts of one large "
            "buffer; each is stored by itself, so they no longer share memory when loaded"
        )
    for span in group:
        chunk = None if span.gaps else _range(span, notes)
        if chunk is not None:
            chunks.append(chunk)
        elif span.gaps:
            chunks.append(_copied(span.gaps, span.users, notes))
        else:
            chunks.extend(_copied(leaf.footprint(), [leaf], notes) for leaf in span.users)


def _range(span: _Span, notes: list[str]) -> Chunk | None:
    """The chunk of a range; None when no start of it suits the alignment of every dtype."""
    users = sorted(span.users, key=lambda leaf: leaf.key)
    rows = {leaf.row.code: leaf.row for leaf in users}
    row = users[0].row if len(rows) == 1 else UINT8
    start, end = span.start, span.end
    if len(rows) > 1 or any((leaf.start - start) % row.size for leaf in users):
        row = UINT8
        bases = [leaf.tensor.untyped_storage() for leaf in users]
        first = min(storage.data_ptr() for storage in bases if storage.data_ptr() <= start)
        fits = [
            shift
            for shift in range(_ALIGN_MAX)
            if start - shift >= first and all((leaf.start - start + shift) % leaf.row.size == 0 for leaf in users)
        ]
        if not fits:
            notes.append(f"{', '.join(leaf.key for leaf in users[:3])} share memory at odd addresses; stored apart")
            return None
        start -= fits[0]
    sizes: tuple[int, ...] = ((end - start) // row.size,)
    for leaf in sorted(users, key=lambda leaf: not leaf.contiguous):
        if leaf.start == start and leaf.nbytes == end - start and leaf.row is row and 0 not in leaf.stride:
            order = sorted(range(len(leaf.shape)), key=lambda dim: -leaf.stride[dim])
            sizes = leaf.shape if leaf.contiguous else tuple(leaf.shape[dim] for dim in order)
            break
    owner: object = [leaf.tensor for leaf in users] if len(users) > 1 else users[0].tensor
    pointer = start
    if not users[0].is_within_reach:
        storage = users[0].tensor.untyped_storage()
        flat = tensor_over(
            storage, torch.uint8, start - storage.data_ptr(), (end - start,), (1,), users[0].tensor.device
        ).cpu()
        owner, pointer = flat, flat.data_ptr()
    views = [View(leaf, (leaf.start - start) // leaf.row.size, leaf.stride) for leaf in users]
    return Chunk(row, sizes, pointer, end - start, owner, views, device=users[0].device)


def _copied(footprint: Footprint, users: Sequence[TensorLeaf], notes: list[str]) -> Chunk:
    """The chunk of views with gaps over the same elements: only those, packed in their order of memory."""
    first = min(users, key=lambda leaf: leaf.key)
    bare = physical(first.tensor)
    if footprint.scattered:
        notes.append(f"{first.key} shows some elements several times; it is stored and loaded as a plain copy")
        steps = first.stride
    else:
        steps = tuple(step if count > 1 else 0 for step, count in zip(first.stride, first.shape, strict=True))
    for dim, step in enumerate(steps):
        if step == 0:
            bare = bare.narrow(dim, 0, 1)
    order = sorted(range(len(steps)), key=lambda dim: -first.stride[dim])
    elements = bare.permute(order)
    if first.device or not elements.is_cpu:
        elements = elements.contiguous()  # where it is
        elements = elements if is_within_reach(elements) else elements.cpu()
    sizes, size = tuple(elements.shape), first.row.size
    strides = () if elements.is_contiguous() else tuple(stride * size for stride in elements.stride())
    own = dict(zip(order, contiguous_strides(sizes), strict=True))
    if footprint.scattered:
        own_strides = tuple(0 if step == 0 else own[dim] for dim, step in enumerate(steps))
        views = [View(first, 0, own_strides)]
    else:
        views = [View(leaf, 0, _mapped(leaf, footprint)) for leaf in users]
    nbytes, device = elements.numel() * size, device_of(elements)
    return Chunk(first.row, sizes, elements.data_ptr(), nbytes, elements, views, strides, device=device)


def _mapped(leaf: TensorLeaf, footprint: Footprint) -> tuple[int, ...]:
    """The strides of ``leaf`` in elements, once the gaps of its footprint are closed.

    Each dimension of the view is part of one dimension of the footprint: the one with the largest stride that is not
    larger than its own. Closing the gaps changes that stride only.
    """
    closed: list[tuple[int, int]] = []  # stride in memory → stride when packed, in bytes, ascending
    step = 1
    for stride, count in reversed(footprint.dims):
        closed.append((stride, step))
        step *= count
    size = leaf.row.size
    plain = contiguous_strides(leaf.shape)
    mapped = []
    for dim, (stride, count) in enumerate(zip(leaf.stride, leaf.shape, strict=True)):
        if count == 1:
            mapped.append(plain[dim])
        elif stride == 0:
            mapped.append(0)
        else:
            at = bisect.bisect_right(closed, (stride * size, step)) - 1
            mapped.append(stride * size // closed[at][0] * closed[at][1] // size)
    return tuple(mapped)
