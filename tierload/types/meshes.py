"""Values that say which rank of a job holds which part of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from tierload.errors import InvalidRequest

__all__ = ["Box", "Layout", "Mesh", "Placement", "Sharded"]

Placement = int | tuple[int, int] | None
"""What one dimension of a mesh does. None: every rank has a copy; ``d``: dimension ``d`` of the tensor is cut into one
part a rank; ``(d, n)``: it is cut into ``n`` parts, each of which is dealt out (torch's _StridedShard)."""


class Box(NamedTuple):
    """An n-dimensional slice of a tensor: where it begins, and its sizes, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks of the world as an array of ``shape``, row-major.

    Raises:
        InvalidRequest: The ranks are not as many as the shape says, or not distinct.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    # Thousands of ranks are hashed once, not at every look into a cache. Hashes of numbers are the same in every
    # process, those of text are not: a mesh may travel.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise InvalidRequest(f"a mesh of shape {self.shape} needs {prod(self.shape)} distinct ranks")
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is spread: one placement for each dimension of the mesh, applied from left to right.

    Raises:
        InvalidRequest: There is not one placement a dimension, or one is of no use.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        cuts = [one if isinstance(one, tuple) else (one, 1) for one in self.placements if one is not None]
        if len(self.placements) != len(self.mesh.shape) or any(dim < 0 or factor < 1 for dim, factor in cuts):
            raise InvalidRequest(f"placements {self.placements} do not fit a mesh of shape {self.mesh.shape}")


@dataclass(frozen=True, slots=True)
class Sharded:
    """What the local part of a tensor belongs to: the shape of the whole, and how that is laid over the ranks."""

    shape: tuple[int, ...]
    layout: Layout
