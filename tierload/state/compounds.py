"""Tensors that are made of others: sparse, quantized, nested, or of a traceable wrapper subclass. Taking them apart.

The parts are ordinary tensors over the memory of the compound one, so they are stored, tied and filled like any other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from tierload.state.registry import is_wrapper, type_name
from tierload.state.scalars import Unwritable
from tierload.state.tensors import tensor_over

__all__ = ["COMPRESSED", "LAYOUTS", "PACKED", "QUANTIZED", "Compound", "is_compound", "kind_of_tensor", "take_apart"]

COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
"""Layouts with compressed indices, and what torch calls the compressed and the plain ones."""

LAYOUTS: dict[torch.layout, str] = {getattr(torch, name): name for name in ("sparse_coo", *COMPRESSED)}

QUANTIZED = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
"""Quantized dtypes whose elements are integers of this dtype."""

PACKED = {"quint4x2": 2, "quint2x4": 4}
"""Quantized dtypes that put this many elements into a byte."""

_CHANNELS = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


@dataclasses.dataclass(slots=True)
class Compound:
    """A tensor taken apart: docs/FORMAT.md section 8. ``facts`` are the members of its form, as JSON has them;
    ``context`` is what a subclass says of itself beside its parts."""

    form: str
    facts: dict[str, Any]
    parts: dict[str, torch.Tensor]
    context: object = None


def is_compound(value: object) -> bool:
    """Whether ``value`` is a tensor that is stored by its parts."""
    if not isinstance(value, torch.Tensor):
        return False
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        return value.layout is not torch.strided or value.is_nested or value.is_quantized
    return is_wrapper(type(value))


def kind_of_tensor(tensor: torch.Tensor) -> str:
    """What a tensor is, in words."""
    if not is_compound(tensor):
        return "a tensor"
    if tensor.is_nested:
        return f"a nested tensor ({'jagged' if tensor.layout is torch.jagged else 'strided'})"
    if is_wrapper(type(tensor)):
        return f"a {type_name(type(tensor))}"
    return "a quantized tensor" if tensor.is_quantized else f"a tensor of layout {tensor.layout}"


def take_apart(tensor: torch.Tensor) -> Compound:
    """The parts of a compound tensor; the caller keeps them alive.

    Raises:
        Unwritable: There is no way to store it; the message says why and what to do.
    """
    if tensor.is_meta:
        raise Unwritable("it is on the meta device, which has no data: materialise it before saving")
    if tensor.is_nested:
        return _jagged(tensor) if tensor.layout is torch.jagged else _nested(tensor.detach())
    if is_wrapper(type(tensor)):
        return _subclass(tensor)
    if tensor.is_quantized:
        return _quantized(tensor.detach())
    return _sparse(tensor.detach())


def _sparse(tensor: torch.Tensor) -> Compound:
    form = LAYOUTS.get(tensor.layout)
    if form is None:
        raise Unwritable(
            f"its layout is {tensor.layout}, which only some operators of this machine read: .to_dense() it"
        )
    facts: dict[str, Any] = {"shape": list(tensor.shape)}
    if form == "sparse_coo":
        facts["coalesced"] = tensor.is_coalesced()
        # The public ones refuse a tensor that is not coalesced; its elements are kept as they are.
        return Compound(form, facts, {"indices": tensor._indices(), "values": tensor._values()})
    parts = {name: getattr(tensor, name)() for name in COMPRESSED[form]}
    return Compound(form, facts, parts | {"values": tensor.values()})


def _quantized(tensor: torch.Tensor) -> Compound:
    name, shape, scheme = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.qscheme()
    storage, device = tensor.untyped_storage(), tensor.device
    if name in QUANTIZED:
        offset = int(tensor.storage_offset())
        integers = tensor_over(storage, QUANTIZED[name], offset, shape, tensor.stride(), device)
    elif name in PACKED and tensor.is_contiguous() and not tensor.storage_offset():
        count = -(-tensor.numel() // PACKED[name])
        integers = tensor_over(storage, torch.uint8, 0, (count,), (1,), device)
    else:
        raise Unwritable(f"it is a view of packed {name} elements: store the whole tensor, or dequantize it")
    facts: dict[str, Any] = {"dtype": name, "shape": list(shape), "axis": None}
    if scheme is torch.per_tensor_affine:
        scale = torch.tensor(tensor.q_scale(), dtype=torch.float64)
        zero_point = torch.tensor(tensor.q_zero_point(), dtype=torch.int64)
    elif scheme in _CHANNELS:
        scale, zero_point = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        facts["axis"] = tensor.q_per_channel_axis()
    else:
        raise Unwritable(f"its quantization scheme is {scheme}: dequantize it")
    return Compound("quantized", facts, {"int_repr": integers, "scale": scale, "zero_point": zero_point})


def _nested(tensor: torch.Tensor) -> Compound:
    components = tensor.unbind()
    values = tensor.values()
    if not tensor.is_contiguous() or values.numel() != sum(component.numel() for component in components):
        values = torch.cat([component.reshape(-1) for component in components])
    dims = tensor.dim() - 1 if components else 0
    sizes = torch.tensor([list(component.shape) for component in components], dtype=torch.int64)
    return Compound("nested", {}, {"values": values, "sizes": sizes.reshape(len(components), dims)})


def _jagged(tensor: Any) -> Compound:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    parts = {name: inner[f"_{name}"].detach() for name in ("values", "offsets", "lengths") if f"_{name}" in inner}
    # torch keeps these two numbers as the shape of a tensor without elements.
    bounds = [inner.get(f"_{which}_seqlen_tensor") for which in ("min", "max")]
    seqlens = [None if bound is None else int(bound.shape[0]) for bound in bounds]
    return Compound("jagged", {"ragged": context["ragged_idx"], "seqlens": seqlens}, parts)


def _subclass(tensor: Any) -> Compound:
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    for name, part in parts.items():
        if type(name) is not str or not isinstance(part, torch.Tensor) or part is tensor:
            raise Unwritable(f"its __tensor_flatten__ names {name!r}, which is no tensor inside it")
    sizes = [*tensor.shape, *tensor.stride()]
    if not all(type(size) is int for size in sizes) or math.prod(tensor.shape) >= 1 << 63:
        raise Unwritable(f"its shape {tuple(tensor.shape)} and strides are no plain numbers")
    facts = {"type": type_name(type(tensor)), "shape": sizes[: tensor.dim()], "stride": sizes[tensor.dim() :]}
    return Compound("subclass", facts, parts, context)
