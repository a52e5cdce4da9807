"""States of optimizers that belong to one rank's part of a parameter, such as 8-bit moments and the scales of their
blocks: nobody can cut them anew, so they are refused where a parameter is now cut in another way."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from tierload.state.documents import WholeState
from tierload.state.keys import Path
from tierload.state.sharding import is_spread, sharded
from tierload.state.slots import chunk_places
from tierload.types import Layout

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["Cuts", "refuse_of_another_cut"]


class Cuts:
    """How the tensors of a state that ranks saved were cut; ``None``: that of one rank, where nothing was."""

    def __init__(self, whole: WholeState | None) -> None:
        self.owner = None if whole is None else whole.owner
        tensors = () if whole is None else whole.tensors
        self.spread = {number for number, tensor in enumerate(tensors) if tensor.layout is not None}
        self._layouts = {tensor.key: tensor.layout for tensor in tensors if tensor.layout is not None}

    def of(self, keys: Iterable[str]) -> Layout | None:
        """That of the tensor which has one of these keys."""
        return next((self._layouts[key] for key in keys if key in self._layouts), None)


def refuse_of_another_cut(binder: Binder, parameter: torch.Tensor, name: str | None, node: object, path: Path) -> bool:
    """Whether the stored state of a parameter, called ``name`` in the store, has values of a part of it that this rank
    does not have; they are reported."""
    live = sharded(parameter, path).layout if is_spread(parameter) else None
    stored = binder.cuts.of([*([name] if name else []), *binder.names.of(parameter)])
    if _cut(stored) == _cut(live) and (_cut(live) is None or _rank(parameter) == binder.cuts.owner):
        return False
    shape = tuple(parameter.shape)
    for place in chunk_places(node):
        row = binder.reader.memory.row(place["chunk"])[0]
        found = tuple(place.get("shape", row.shape))
        if place["chunk"] not in binder.cuts.spread and prod(found) > 1 and found != shape:
            binder.problems.shapes(
                path,
                f"has a value of shape {found} where its parameter has {shape}: it belongs to the part of a rank that "
                "had another one than this rank; load it on ranks with the same parts, or leave the optimizer out",
            )
            return True
    return False


def _cut(layout: Layout | None) -> object:
    """What tells one way to cut a tensor from another; None where every rank has all of it."""
    if layout is None:
        return None
    mesh = layout.mesh
    is_cut = any(one is not None and size > 1 for one, size in zip(layout.placements, mesh.shape, strict=True))
    return (mesh.shape, mesh.ranks, layout.placements) if is_cut else None


def _rank(parameter: Any) -> int:
    return int(parameter.device_mesh.get_rank())
