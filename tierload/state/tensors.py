"""What the store needs to know of one tensor: its dtype, geometry and memory; and which tensors it refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tierload import _native
from tierload.errors import UnsupportedValue
from tierload.state.dtypes import BY_DTYPE, DType
from tierload.state.footprints import Footprint, contiguous_strides, footprint_of
from tierload.state.keys import Path

__all__ = [
    "NDIM_MAX",
    "TORCH",
    "TensorLeaf",
    "device_of",
    "is_freed",
    "is_plain_tensor",
    "is_within_reach",
    "physical",
    "refusal",
    "tensor_over",
]

NDIM_MAX = 255
"""Dimensions that a tensor may have: the manifest has a byte for their number."""

TORCH = _native.Torch(
    torch.Tensor,
    torch.nn.Parameter,
    [(row.torch, row.code, row.size, row.torch.is_floating_point, row.torch.is_complex) for row in BY_DTYPE.values()],
    getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
)
"""What the native core asks torch about tensors."""


def is_plain_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor and no subclass other than Parameter."""
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor have no memory, since somebody has resized its storage to nothing."""
    return tensor.numel() > 0 and not tensor.is_meta and tensor.untyped_storage().nbytes() == 0


def device_of(tensor: torch.Tensor) -> int:
    """The number of the accelerator in whose memory a tensor's elements are (native/include/tierload/accelerator.h).
    0: the processor, or a device that the core knows no way to."""
    if tensor.is_cpu:
        return _native.fake_at(tensor.data_ptr())
    return _number_of(tensor.device) if tensor.is_cuda else 0


@cache
def _number_of(device: torch.device) -> int:
    number = int(device.index) + 1
    # torch calls ROCm's devices by CUDA's name.
    return number if torch.version.hip is None and not _native.accelerator_refusal(number) else 0


def is_within_reach(tensor: torch.Tensor) -> bool:
    """Whether the core reads and writes a tensor's elements where they are; else they are copied by torch."""
    return tensor.is_cpu or device_of(tensor) != 0


class TensorLeaf:
    """A tensor of a state that is being saved, described once.

    ``start`` is the address of its first element, in the memory of accelerator ``device`` (0: none); ``shape`` and
    ``stride`` are in elements; ``nbytes`` counts each element as often as the view shows it. ``marks`` are the members
    of its JSON that say more than the geometry. ``hole`` is where its text goes in the document. It has a dtype of the
    table, and data.
    """

    __slots__ = ("contiguous", "device", "hole", "key", "marks", "nbytes", "row", "shape", "start", "stride", "tensor")

    def __init__(self, tensor: torch.Tensor, key: str, hole: int) -> None:
        row = BY_DTYPE[tensor.dtype]
        self.key = key
        self.tensor = tensor
        self.row: DType = row
        self.hole = hole
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.stride: tuple[int, ...] = tensor.stride()
        self.start: int = tensor.data_ptr()
        self.device = device_of(tensor)
        self.nbytes: int = tensor.numel() * row.size
        # torch calls a tensor contiguous whatever the strides of its dimensions of size 1 (or of an empty one).
        self.contiguous = tensor.is_contiguous() and (
            (1 not in self.shape and 0 not in self.shape) or self.stride == contiguous_strides(self.shape)
        )
        marks = ""
        if row.torch.is_complex and tensor.is_conj():
            marks += ',"conj":true'
        if tensor.is_neg():
            marks += ',"neg":true'
        if type(tensor) is torch.nn.Parameter:
            marks += ',"kind":"parameter"'
        if tensor.requires_grad:
            marks += ',"grad":true'
            self.tensor = tensor.detach()  # the graph is not kept alive
        self.marks = marks

    def footprint(self) -> Footprint:
        """The bytes of memory that it covers."""
        return footprint_of(self.start, self.shape, self.stride, self.row.size)

    @property
    def is_within_reach(self) -> bool:
        """Whether the core reads its elements where they are."""
        return self.tensor.is_cpu or self.device != 0

    @property
    def range(self) -> tuple[int, int]:
        """The addresses of its first byte and of the one after its last; it has elements."""
        return self.start, self.start + (self.nbytes if self.contiguous else self.footprint().span)


def refusal(tensor: torch.Tensor, path: Path) -> UnsupportedValue:
    """Why ``tensor`` is not stored, and what to do."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        what = f"a tensor subclass {kind.__module__}.{kind.__qualname__}"
        advice = "give it __tensor_flatten__ and __tensor_unflatten__, store plain tensors, or initialise it first"
    elif tensor.is_meta:
        what, advice = "a tensor on the meta device, which has no data", "materialise it before saving"
    elif tensor.dim() > NDIM_MAX:
        what, advice = f"a tensor of {tensor.dim()} dimensions", f"give it {NDIM_MAX} at most"
    elif tensor.dtype in BY_DTYPE:
        what, advice = "a tensor whose memory has been freed", "give it its memory back before saving or loading"
    else:
        what = f"a tensor of dtype {tensor.dtype}"
        advice = "store its bytes, as in tensor.view(torch.uint8)"
    return UnsupportedValue(f"{path.shown()} (key {path.text()!r}) is {what}, which cannot be stored: {advice}")


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without gradient, conjugate and negative bit."""
    bare = tensor.detach()
    if bare.is_conj():
        bare = bare.conj()
    return torch._neg_view(bare) if bare.is_neg() else bare


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: Any = "cpu",
) -> torch.Tensor:
    """A tensor over memory that exists. The caller has checked that it stays inside: torch would grow the storage."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)
