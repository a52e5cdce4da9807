"""A tensor as the document describes it, checked against its chunk before any memory is touched."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tierload.errors import CorruptStore, UnsupportedValue
from tierload.state.dtypes import BY_NAME, CODE_NAMES, DType
from tierload.state.footprints import contiguous_strides
from tierload.state.memory import Memory
from tierload.state.tensors import NDIM_MAX, tensor_over
from tierload.types import ChunkInfo

__all__ = ["TensorView", "read_view", "whole_chunk", "whole_view"]

_INT64_MAX = (1 << 63) - 1
_MEMBERS = {"chunk", "shape", "stride", "offset", "dtype", "conj", "neg", "grad", "kind", "tie", "apart"}


class TensorView(NamedTuple):
    """One ``t`` of the document. ``offset`` and ``stride`` are in elements of ``row``; ``whole`` says that the view is
    the chunk's elements in order, so that the tensor may own the memory. ``apart`` is the number that views of the same
    memory in several chunks have, or -1."""

    chunk: int
    row: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool
    conj: bool
    neg: bool
    grad: bool
    kind: str
    tied: bool
    apart: int = -1

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The view of ``memory``, a tensor that owns the chunk's bytes, with its conjugate and negative bit."""
        return self.marked(tensor_over(memory.untyped_storage(), self.row.torch, self.offset, self.shape, self.stride))

    def marked(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with the conjugate and negative bit that this view has."""
        if self.conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.neg else tensor

    def data(self, memory: Memory) -> torch.Tensor:
        """A plain tensor over the chunk's memory. Its bytes may be still to come."""
        alone = self.whole and self.shape == memory.row(self.chunk)[0].sizes and not memory.has_tensor(self.chunk)
        whole = memory.whole(self.chunk) if alone else None
        return self.over(memory.tensor(self.chunk)) if whole is None else self.marked(whole)

    def tensor(self, memory: Memory) -> torch.Tensor:
        """The tensor as the user saved it: parameter, gradient and all."""
        return self.as_saved(self.data(memory))

    def as_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, the data of this view, as the parameter that was saved, or with its gradient."""
        if self.kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=self.grad)
        return tensor.requires_grad_() if self.grad else tensor


def whole_view(chunk: ChunkInfo, row: DType) -> TensorView:
    """The view that is all of a chunk."""
    stride = contiguous_strides(chunk.sizes)
    return TensorView(chunk.number, row, chunk.sizes, stride, 0, True, False, False, False, "", False)


def whole_chunk(content: object, memory: Memory) -> ChunkInfo | None:
    """The chunk that a ``t`` shows whole and in order, with nothing more to say, as most tensors do; else None."""
    if type(content) is not dict or len(content) != 2:
        return None
    sizes = content.get("shape")
    chunk, _ = memory.row(content.get("chunk"))
    is_whole = type(sizes) is list and tuple(sizes) == chunk.sizes and all(type(size) is int for size in sizes)
    return chunk if is_whole else None


def read_view(content: Any, memory: Memory) -> TensorView:
    """Check a ``t`` of the document.

    Raises:
        CorruptStore: It is damaged, or leaves its chunk.
        UnsupportedValue: This torch lacks its dtype.
    """
    if type(content) is not dict or not content.keys() <= _MEMBERS:
        raise CorruptStore(f"the state document has a damaged tensor: {content!r:.80}")
    chunk, own = memory.row(content.get("chunk"))
    if whole_chunk(content, memory) is not None:
        return whole_view(chunk, own)
    row = own
    if "dtype" in content:
        name = content["dtype"]
        if name not in CODE_NAMES.values():
            raise CorruptStore(f"key {chunk.key!r}: unknown dtype {name!r:.40}")
        if name not in BY_NAME:
            raise UnsupportedValue(f"key {chunk.key!r} has dtype {name}, which torch {torch.__version__} lacks")
        row = BY_NAME[name]
    shape = _counts(content.get("shape"), chunk.key)
    length = math.prod(shape)
    held = chunk.nbytes // row.size
    plain = contiguous_strides(shape)
    if "stride" in content or "offset" in content:
        stride = _counts(content.get("stride"), chunk.key)
        (offset,) = _counts([content.get("offset")], chunk.key)
        if len(stride) != len(shape):
            raise CorruptStore(f"key {chunk.key!r}: {len(shape)} sizes, {len(stride)} strides")
        last = offset + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
        if length and last >= held:
            raise CorruptStore(f"key {chunk.key!r}: a view of element {last} in a chunk of {held}")
        if not length:
            offset = 0
    else:
        stride, offset = plain, 0
        if length * row.size != chunk.nbytes:
            raise CorruptStore(f"key {chunk.key!r}: shape {shape} of {row.name} in a chunk of {chunk.nbytes} bytes")
    if length > _INT64_MAX // row.size:
        raise CorruptStore(f"key {chunk.key!r}: shape {shape}")
    flags = [content.get(name, False) for name in ("conj", "neg", "grad")]
    kind, apart = content.get("kind", ""), content.get("apart", -1)
    if (
        type(apart) is not int
        or any(type(flag) is not bool for flag in flags)
        or kind not in ("", "parameter", "buffer")
        or (flags[0] and not row.torch.is_complex)
        or (flags[2] and not row.differentiable)
    ):
        raise CorruptStore(f"key {chunk.key!r}: a tensor of {row.name} with {content!r:.200}")
    whole = stride == plain and not offset and row is own and length * row.size == chunk.nbytes
    conj, neg, grad = flags
    return TensorView(chunk.number, row, shape, stride, offset, whole, conj, neg, grad, kind, "tie" in content, apart)


def _counts(content: object, key: str) -> tuple[int, ...]:
    """Numbers from 0 to 2⁶³-1: a shape, strides, or an offset."""
    if type(content) is not list or len(content) > NDIM_MAX:
        raise CorruptStore(f"key {key!r}: {content!r:.60} where a shape or strides belong")
    if any(type(number) is not int or not 0 <= number <= _INT64_MAX for number in content):
        raise CorruptStore(f"key {key!r}: {content!r:.60} where a shape or strides belong")
    return tuple(content)
