"""The one table of dtypes: code of docs/FORMAT.md section 6, name, torch.dtype, bytes an element.

A dtype that the installed torch lacks is left out: its tensors cannot exist here, and reading one is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["BY_CODE", "BY_DTYPE", "BY_NAME", "CODE_NAMES", "FLOATING", "ITEM_SIZES", "UINT8", "DType"]

CODE_NAMES = {
    1: "bool",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "uint32",
    7: "int32",
    8: "uint64",
    9: "int64",
    10: "float16",
    11: "bfloat16",
    12: "float32",
    13: "float64",
    14: "complex32",
    15: "complex64",
    16: "complex128",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    21: "float8_e8m0fnu",
    22: "float4_e2m1fn_x2",
    **{22 + bits: f"int{bits}" for bits in range(1, 8)},
    **{29 + bits: f"uint{bits}" for bits in range(1, 8)},
    37: "bits8",
    38: "bits16",
    39: "bits1x8",
    40: "bits2x4",
    41: "bits4x2",
}

_SHELLS = range(23, 42)

_CASTABLE = {"float16", "bfloat16", "float32", "float64"}


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table.

    ``size`` is bytes an element. ``item_size`` and ``floating`` are what the codec splits into planes: a complex
    number is two floats. ``castable`` says that a load with ``cast=True`` may convert it to another such dtype.
    """

    code: int
    name: str
    torch: torch.dtype
    size: int
    item_size: int
    floating: bool
    castable: bool

    @property
    def is_shell(self) -> bool:
        """Whether torch has the dtype, and hardly an operator for it: not even ``copy_`` for most."""
        return self.code in _SHELLS

    @property
    def differentiable(self) -> bool:
        """Whether a tensor of this dtype may require a gradient."""
        return self.torch.is_floating_point or self.torch.is_complex


def _rows() -> list[DType]:
    rows = []
    for code, name in CODE_NAMES.items():
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            size = dtype.itemsize
            item = size // 2 if dtype.is_complex else size
            floating = (dtype.is_floating_point or dtype.is_complex) and name != "float4_e2m1fn_x2"
            rows.append(DType(code, name, dtype, size, item, floating, name in _CASTABLE))
    return rows


BY_CODE: dict[int, DType] = {row.code: row for row in _rows()}
BY_NAME: dict[str, DType] = {row.name: row for row in BY_CODE.values()}
BY_DTYPE: dict[torch.dtype, DType] = {row.torch: row for row in BY_CODE.values()}
UINT8 = BY_NAME["uint8"]

ITEM_SIZES = np.ones(max(CODE_NAMES) + 1, np.uint8)
FLOATING = np.zeros(max(CODE_NAMES) + 1, np.bool_)
"""Of each code; those that this torch lacks are never asked for."""

for _row in BY_CODE.values():
    ITEM_SIZES[_row.code], FLOATING[_row.code] = _row.item_size, _row.floating
