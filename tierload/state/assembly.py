"""Compound tensors put together again from their parts, which come from a store that nobody vouches for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tierload.errors import CorruptStore
from tierload.state.compounds import COMPRESSED, PACKED, QUANTIZED
from tierload.state.keys import Path
from tierload.state.scalars import sized
from tierload.state.tensors import tensor_over

__all__ = ["CompoundNode", "assemble", "marked", "read_compound"]

Parts = Mapping[str, torch.Tensor]

_INT64_MAX = (1 << 63) - 1

_FACTS: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("shape", "coalesced"),
    **dict.fromkeys(COMPRESSED, ("shape",)),
    "quantized": ("dtype", "shape", "axis"),
    "nested": (),
    "jagged": ("ragged", "seqlens"),
    "subclass": ("type", "shape", "stride"),
}

_PARTS: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values"),
    **{form: (*names, "values") for form, names in COMPRESSED.items()},
    "quantized": ("int_repr", "scale", "zero_point"),
    "nested": ("values", "sizes"),
    "jagged": ("values", "offsets"),
}


class CompoundNode(NamedTuple):
    """One ``compound`` of the document; ``parts`` and ``context`` are nodes."""

    form: str
    facts: dict[str, Any]
    parts: dict[str, object]
    context: object
    kind: str
    grad: bool

    def told(self) -> str:
        """What it is, in words."""
        if self.form == "subclass":
            return f"a {self.facts['type']}"
        if self.form in ("nested", "jagged"):
            return f"a nested tensor ({'jagged' if self.form == 'jagged' else 'strided'})"
        return "a quantized tensor" if self.form == "quantized" else f"a tensor of layout torch.{self.form}"


def read_compound(content: Any, path: Path) -> CompoundNode:
    """Check a ``compound`` of the document, as far as that needs no bytes.

    Raises:
        CorruptStore: It is damaged.
    """
    damage = CorruptStore(f"{path.shown()} is a damaged compound tensor: {content!r:.120}")
    form = content.get("form") if type(content) is dict else None
    if type(form) is not str or form not in _FACTS:
        raise damage
    own = {"form", "parts", *_FACTS[form]} | ({"context"} if form == "subclass" else set())
    facts = {name: content.get(name) for name in _FACTS[form]}
    kind, grad = content.get("kind", ""), content.get("grad", False)
    if content.keys() - {"kind", "grad"} != own or kind not in ("", "parameter") or type(grad) is not bool:
        raise damage
    pairs = [sized(pair, 2) for pair in sized(content["parts"])]
    names = [name for name, _ in pairs]
    if any(type(name) is not str for name in names) or len(set(names)) != len(names) or not _fits(form, facts, names):
        raise damage
    return CompoundNode(form, facts, dict(pairs), content.get("context"), kind, grad)


def _fits(form: str, facts: dict[str, Any], names: list[str]) -> bool:
    """Whether members and names of parts are those of a form."""
    own = _PARTS.get(form, tuple(names))
    if tuple(names) != own and not (form == "jagged" and tuple(names) == (*own, "lengths")):
        return False
    if not all(_are_counts(facts[name]) for name in ("shape", "stride") if name in facts):
        return False
    if form == "sparse_coo":
        return type(facts["coalesced"]) is bool
    if form == "quantized":
        axis = facts["axis"]
        known = type(facts["dtype"]) is str and facts["dtype"] in (*QUANTIZED, *PACKED)
        return known and (axis is None or (type(axis) is int and 0 <= axis < len(facts["shape"])))
    if form == "jagged":
        seqlens = facts["seqlens"]
        bounds = type(seqlens) is list and len(seqlens) == 2 and _are_counts([n for n in seqlens if n is not None])
        return bounds and type(facts["ragged"]) is int and facts["ragged"] >= 1
    if form == "subclass":
        return type(facts["type"]) is str and len(facts["shape"]) == len(facts["stride"])
    return True


def _are_counts(numbers: object) -> bool:
    return type(numbers) is list and all(type(n) is int and 0 <= n <= _INT64_MAX for n in numbers)


def assemble(form: str, facts: Mapping[str, Any], parts: Parts) -> torch.Tensor:
    """The tensor of any form but ``subclass``, over the memory of its parts where torch allows that.

    Indices, offsets and sizes are checked: torch's operators trust them, and would read beyond the values.

    Raises:
        ValueError, RuntimeError: The parts are none of such a tensor.
    """
    return _ASSEMBLERS[form](form, facts, parts)


def marked(tensor: torch.Tensor, kind: str, grad: bool) -> torch.Tensor:
    """``tensor`` as a parameter, or with a gradient, as it was saved."""
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_() if grad else tensor


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _coo(form: str, facts: Mapping[str, Any], parts: Parts) -> torch.Tensor:
    _require(parts["indices"].dtype is torch.int64, "indices of another dtype than int64")
    tensor = torch.sparse_coo_tensor(parts["indices"], parts["values"], facts["shape"], check_invariants=True)
    return tensor._coalesced_(facts["coalesced"])  # what torch made of it: a wrong flag is kept as it was


def _compressed(form: str, facts: Mapping[str, Any], parts: Parts) -> torch.Tensor:
    compressed, plain = (parts[name] for name in COMPRESSED[form])
    return torch.sparse_compressed_tensor(
        compressed, plain, parts["values"], facts["shape"], layout=getattr(torch, form), check_invariants=True
    )


def _quantized(form: str, facts: Mapping[str, Any], parts: Parts) -> torch.Tensor:
    integers, scale, zero_point = parts["int_repr"], parts["scale"], parts["zero_point"]
    name, shape, axis = facts["dtype"], tuple(facts["shape"]), facts["axis"]
    dtype: torch.dtype = getattr(torch, name)
    held = shape if name in QUANTIZED else (-(-math.prod(shape) // PACKED[name]),)
    plain = QUANTIZED.get(name, torch.uint8)
    _require(integers.dtype is plain and tuple(integers.shape) == held, "integers of another dtype or shape")
    kinds = (scale.dtype, zero_point.dtype)
    if axis is None:
        _require(scale.shape == zero_point.shape == () and kinds == (torch.float64, torch.int64), "damaged scale")
        tensor = torch._empty_affine_quantized(
            shape, scale=float(scale), zero_point=int(zero_point), dtype=dtype, device=integers.device
        )
    else:
        pairs = ((torch.float64, torch.int64), (torch.float32, torch.float32))
        _require(scale.shape == zero_point.shape == (shape[axis],) and kinds in pairs, "damaged scales")
        tensor = torch._empty_per_channel_affine_quantized(
            shape, scales=scale, zero_points=zero_point, axis=axis, dtype=dtype, device=integers.device
        )
    if name in QUANTIZED:
        return tensor.set_(integers.untyped_storage(), int(integers.storage_offset()), shape, integers.stride())
    # torch counts a byte for each packed element, and would make the storage of the part larger: a copy, then.
    tensor_over(tensor.untyped_storage(), torch.uint8, 0, held, (1,), tensor.device).copy_(integers)
    return tensor


def _nested(form: str, facts: Mapping[str, Any], parts: Parts) -> torch.Tensor:
    values, sizes = parts["values"], parts["sizes"]
    _require(values.dim() == 1 and sizes.dim() == 2 and sizes.dtype is torch.int64, "damaged sizes")
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=values.dtype, layout=torch.strided)
    components, at = [], 0
    for shape in sizes.tolist():
        _require(min(shape, default=0) >= 0, "a negative size")
        count = math.prod(shape)
        _require(count <= values.numel() - at, "sizes of more than there is")
        components.append(values[at : at + count].view(shape))
        at += count
    _require(at == values.numel(), "sizes of less than there is")
    return torch.nested.as_nested_tensor(components, layout=torch.strided)


def _jagged(form: str, facts: Mapping[str, Any], parts: Parts) -> torch.Tensor:
    values, offsets, lengths, ragged = parts["values"], parts["offsets"], parts.get("lengths"), facts["ragged"]
    _require(ragged <= values.dim() and offsets.dim() == 1 and len(offsets) > 0, "damaged offsets")
    starts, ends = offsets[:-1], offsets[1:]
    if lengths is not None:
        _require(lengths.shape == starts.shape and lengths.dtype is offsets.dtype, "damaged lengths")
        ends = starts + lengths
    _require(offsets.dtype in (torch.int32, torch.int64), "offsets of another dtype than int64 and int32")
    limit = values.shape[ragged - 1]
    inside = bool(((offsets >= 0) & (offsets <= limit)).all()) and bool(((ends >= starts) & (ends <= limit)).all())
    _require(inside and bool((offsets[1:] >= offsets[:-1]).all()), "offsets that leave the values")
    least, most = facts["seqlens"]
    found = (ends - starts).tolist()
    _require(least is None or not found or least <= min(found), "a least length above one that is there")
    _require(most is None or not found or most >= max(found), "a largest length below one that is there")
    tensor: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=ragged, min_seqlen=least, max_seqlen=most
    )
    return tensor


_ASSEMBLERS: dict[str, Callable[[str, Mapping[str, Any], Parts], torch.Tensor]] = {
    "sparse_coo": _coo,
    **dict.fromkeys(COMPRESSED, _compressed),
    "quantized": _quantized,
    "nested": _nested,
    "jagged": _jagged,
}
