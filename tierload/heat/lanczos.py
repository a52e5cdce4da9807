"""The spectral radius of a symmetric matrix that is known by its products with vectors.

Lanczos with full reorthogonalisation: C. Lanczos, J. Res. Nat. Bur. Standards 45 (1950); the bound on the error is that
of B. N. Parlett, The Symmetric Eigenvalue Problem (1980), section 13.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["PRODUCTS", "TOLERANCE", "Product", "Radius", "spectral_radius"]

PRODUCTS = 20
"""As many products a radius may take at most."""

TOLERANCE = 0.05
"""Residual at which a radius is good enough, as a part of it."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""A symmetric matrix times a vector, both flat and of one dtype."""


class Radius(NamedTuple):
    """The largest absolute eigenvalue, as found with so many products. An eigenvalue lies within ``residual`` of it or
    of its negative; not a number where the loss has none."""

    value: float
    products: int
    residual: float


def spectral_radius(product: Product, start: torch.Tensor, *, most: int = PRODUCTS) -> tuple[Radius, torch.Tensor]:
    """The spectral radius of the matrix, and the unit vector that belongs to it.

    ``start`` is flat, not zero, and best random: what it has no part of is not found.
    """
    basis: list[torch.Tensor] = [start / torch.linalg.vector_norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        last = basis[-1]
        rest = product(last)
        on = torch.dot(last, rest)
        for _ in range(2):  # once leaves what rounding left; twice is enough
            for vector in basis:
                rest = torch.sub(rest, vector * torch.dot(vector, rest))
        alpha, beta = torch.stack([on, torch.linalg.vector_norm(rest)]).tolist()
        if not math.isfinite(alpha + beta):
            return Radius(math.nan, len(basis), math.nan), basis[0]
        diagonal.append(alpha)
        value, combination = _dominant(diagonal, beside)
        # Only rounding is left once the vectors span all that the product reaches.
        residual = beta * abs(combination[-1]) if len(basis) < len(start) else 0.0
        if len(basis) >= most or residual <= TOLERANCE * value:
            found = torch.zeros_like(start)
            for part, vector in zip(combination, basis, strict=True):
                found.add_(vector, alpha=part)
            return Radius(value, len(basis), residual), found / torch.linalg.vector_norm(found)
        beside.append(beta)
        basis.append(rest / beta)


def _dominant(diagonal: list[float], beside: list[float]) -> tuple[float, list[float]]:
    """The largest absolute eigenvalue of a tridiagonal matrix, and its eigenvector."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    at = int(values.abs().argmax())
    return abs(float(values[at])), vectors[:, at].tolist()
