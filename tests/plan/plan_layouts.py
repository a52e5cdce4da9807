"""Layouts to draw, and torch's own word on what a rank of one holds."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from tierload.types import Layout, Mesh, Placement


def as_torch(placement: Placement) -> TorchPlacement:
    if placement is None:
        return Replicate()
    return Shard(placement) if isinstance(placement, int) else _StridedShard(placement[0], split_factor=placement[1])


def coordinates(layout: Layout, rank: int) -> list[int]:
    position = layout.mesh.ranks.index(rank)
    return torch.tensor(torch.unravel_index(torch.tensor(position), layout.mesh.shape)).tolist()


def torch_local(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The local tensor that torch would give to a rank: split along one dimension of the mesh after the other."""
    local = whole
    for placement, size, at in zip(layout.placements, layout.mesh.shape, coordinates(layout, rank), strict=True):
        if placement is not None:
            local = as_torch(placement)._split_tensor(local, size, with_padding=False)[0][at]
    return local


def torch_shape_and_offset(
    shape: tuple[int, ...], layout: Layout, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    placements = [as_torch(placement) for placement in layout.placements]
    return _compute_local_shape_and_global_offset(shape, layout.mesh.shape, coordinates(layout, rank), placements)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(prod(shape) + draw(st.integers(0, 2)))))
    return Mesh(shape, tuple(ranks[: prod(shape)]))


def layouts(ndim: int) -> st.SearchStrategy[Layout]:
    """Layouts of a tensor of ``ndim`` dimensions."""
    cut = st.integers(0, ndim - 1) if ndim else st.nothing()
    placement = st.none() | cut | st.tuples(cut, st.integers(1, 5))
    return meshes().flatmap(
        lambda mesh: st.tuples(*[placement] * len(mesh.shape)).map(lambda placements: Layout(mesh, placements))
    )


def shapes(min_size: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 13), min_size=min_size, max_size=3).map(tuple)


spread = shapes().flatmap(lambda shape: st.tuples(st.just(shape), layouts(len(shape))))
