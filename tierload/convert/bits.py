"""The bytes of tensors, to write and to compare them: in the order of their elements, whatever their strides."""

from __future__ import annotations

import torch
import xxhash

from tierload.state.compounds import is_compound, kind_of_tensor, take_apart

__all__ = ["bytes_of", "contiguous", "difference", "problem_of"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_BYTES = 64 << 20  # of two mapped files no more than this need be in memory at once


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after another as integers of their size; a copy only where strides need it."""
    bare = tensor.detach().resolve_conj().resolve_neg()
    # Few operators know float8, float4 and complex32; integers of the same size carry the same bytes.
    bits = torch.view_as_real(bare).view(torch.int64) if bare.dtype is torch.complex128 else None
    return (bare.view(_INTEGERS[bare.itemsize]) if bits is None else bits).contiguous()


def bytes_of(tensor: torch.Tensor) -> int:
    """How many bytes the elements of a tensor have; of a compound one, those of its parts."""
    return sum(map(bytes_of, take_apart(tensor).parts.values())) if is_compound(tensor) else tensor.nbytes


def _digest(tensor: torch.Tensor) -> bytes:
    digest = xxhash.xxh3_128()
    bits = contiguous(tensor)
    # A single element is contiguous whatever its strides, but can be seen as bytes only with a stride of 1.
    flat = bits.as_strided((bits.numel(),), (1,)).view(torch.uint8).numpy().data
    for start in range(0, len(flat), _PIECE_BYTES):
        digest.update(flat[start : start + _PIECE_BYTES])
    return digest.digest()


def problem_of(found: object, expected: object) -> str:
    """How a leaf of a state that was read differs from the one that it should be; empty when it is the same."""
    if isinstance(expected, torch.Tensor):
        return difference(found, expected)
    # A nan is the same as a nan.
    same = type(found) is type(expected) and (found == expected or (found != found and expected != expected))
    return "" if same else f"a {type(found).__qualname__} of another value"


def difference(found: object, expected: torch.Tensor) -> str:
    """How a tensor that was read differs from the one that it should be; empty when dtype, shape and bytes agree."""
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__} where a tensor belongs"
    if is_compound(expected) or is_compound(found):
        return _compound_difference(found, expected)
    if found.dtype is not expected.dtype:
        return f"dtype {found.dtype}, not {expected.dtype}"
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, not {list(expected.shape)}"
    for dim, strides in enumerate(zip(found.stride(), expected.stride(), strict=True)):
        if strides == (0, 0) and found.shape[dim]:  # expanded in both: a copy of all elements might be enormous
            found, expected = found.narrow(dim, 0, 1), expected.narrow(dim, 0, 1)
    return "" if _digest(found) == _digest(expected) else "other bytes"


def _compound_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How two tensors differ of which one is made of others."""
    if not (is_compound(found) and is_compound(expected)):
        return f"{kind_of_tensor(found)}, not {kind_of_tensor(expected)}"
    one, other = take_apart(found), take_apart(expected)
    if (one.form, one.facts, one.context) != (
        other.form,
        other.facts,
        other.context,
    ) or one.parts.keys() != other.parts.keys():
        return f"another {kind_of_tensor(expected)}"
    problems = {name: difference(one.parts[name], part) for name, part in other.parts.items()}
    return next((f"{name}: {problem}" for name, problem in problems.items() if problem), "")
