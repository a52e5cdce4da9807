"""Tensors as the state shows them: views of chunks (docs/FORMAT.md section 8)."""

import math
from typing import Any

import numpy as np

from .document import uses
from .manifest import SHELLS, SIZES, Manifest, Tensor
from .report import Damage
from .together import Together


def view(leaf: dict[str, Any], chunk: Tensor, manifest: Manifest | Together) -> Tensor:
    """The tensor that a `t` describes, made contiguous, with conj and neg carried out."""
    dtype, shape, offset = str(leaf.get("dtype", chunk[0])), leaf["shape"], leaf.get("offset", 0)
    stride = leaf.get("stride", [math.prod(shape[at + 1 :]) for at in range(len(shape))])
    numbers = [*shape, *stride, offset]
    if dtype not in SIZES or len(stride) != len(shape) or any(type(n) is not int or n < 0 or n >> 63 for n in numbers):
        raise Damage(f"dtype {dtype}, shape {shape}, stride {stride}, offset {offset}")
    size, count, have = SIZES[dtype], math.prod(shape), len(chunk[2]) // SIZES[dtype]
    if not count:
        return dtype, tuple(shape), b""
    if offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) >= have:
        raise Damage(f"shape {shape}, stride {stride}, offset {offset} go beyond {have} elements")
    manifest.charge(count * size)
    steps = [step * size if n > 1 else 0 for n, step in zip(shape, stride, strict=True)]
    data = np.ndarray(shape, f"V{size}", chunk[2], offset * size, steps).tobytes()
    if leaf.get("conj") or leaf.get("neg"):
        data = _negated(dtype, data, bool(leaf.get("conj")), bool(leaf.get("neg")))
    return dtype, tuple(shape), data


def _negated(dtype: str, data: bytes, conj: bool, neg: bool) -> bytes:
    """Elements with the sign of their imaginary part changed, and then that of the whole."""
    real = not dtype.startswith("complex")
    if "float8" in dtype or "float4" in dtype or dtype in ("bool", *SHELLS) or (real and conj):
        raise Damage(f"conj or neg of {dtype} has no meaning here")
    parts = np.frombuffer(data, f"<u{SIZES[dtype] if real else SIZES[dtype] // 2}").copy()
    sign = parts.dtype.type(1 << (8 * parts.itemsize - 1))
    if conj:
        parts[1::2] ^= sign
    if neg:
        parts = np.negative(parts) if "int" in dtype else parts ^ sign
    return parts.tobytes()


def tensors_of(manifest: Manifest | Together, where: str) -> dict[str, Tensor]:
    """Every tensor of a manifest by its key; what is damaged is reported and left out."""
    found, problems = dict[str, Tensor](), manifest.report.problems
    of_ranks = manifest.own if isinstance(manifest, Together) else ()
    for number, users in enumerate(uses(manifest.state, manifest.chunks, where, manifest.report, of_ranks)):
        keys = sorted((key for key, _, _ in users), key=lambda key: key.encode("utf-8", "surrogatepass"))
        try:
            own = manifest.key(number)
            if keys and keys[0] != own:
                problems.append(f"{where}: chunk {number} is {own!r} in the manifest, {keys} in the document")
            keys = keys or [own]
            chunk = manifest.chunk(number)
        except ValueError as damage:
            problems += [f"{where}, key {key!r}: {damage}" for key in keys or [f"chunk {number}"]]
            continue
        flat = "uint8", (len(chunk[2]),), chunk[2]
        for key, tag, leaf in users or [(own, "", {})]:
            try:
                tensor = view(leaf, chunk, manifest) if tag == "t" else flat if tag else chunk
                if found.setdefault(key, tensor) != tensor:
                    raise Damage("another tensor has this key")
            except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
                problems.append(f"{where}, key {key!r}: {type(error).__name__} {error}")
    return found
