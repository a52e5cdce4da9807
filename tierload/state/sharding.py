"""Tensors that are spread over the ranks of a job (DTensor): what one rank holds, and what that is a part of."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from tierload.errors import UnsupportedValue
from tierload.state.keys import Path
from tierload.state.tensors import is_plain_tensor
from tierload.types import Layout, Mesh, Placement, Sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["is_spread", "like", "local_part", "ranks_of", "sharded"]


def is_spread(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor. Who has none never imports their module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(value: DTensor, path: Path) -> torch.Tensor:
    """The memory of this rank's part, without its gradient.

    Raises:
        UnsupportedValue: It is a tensor of a kind that is not stored in parts.
    """
    with torch.no_grad():
        local = value.to_local()
    if isinstance(local, torch.nn.Parameter):
        local = local.detach()
    wait = getattr(local, "wait", None)  # a communication that is not over yet
    if callable(wait):
        local = wait()
    if not is_plain_tensor(local) or local.layout is not torch.strided or local.is_quantized:
        raise UnsupportedValue(
            f"{path.shown()} (key {path.text()!r}) is spread over ranks and consists of {type(local).__qualname__} "
            f"({local.layout}), which cannot be stored: spread plain tensors"
        )
    return local


def sharded(value: DTensor, path: Path) -> Sharded:
    """The whole that a DTensor stands for.

    Raises:
        UnsupportedValue: It is no plain one: sums that are still to be made, or a placement that is not known.
    """
    placements = tuple(_placement(one, value, path) for one in value.placements)
    mesh, others = _whole_mesh(value.device_mesh)
    return Sharded(tuple(value.shape), Layout(mesh, placements + (None,) * others))


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks that hold tensors of a mesh between them, in ascending order."""
    return tuple(sorted(_whole_mesh(mesh)[0].ranks))


_wholes: dict[int, tuple[Mesh, int]] = {}  # what _whole_mesh found for a mesh that is alive, by its identity


def _whole_mesh(mesh: DeviceMesh) -> tuple[Mesh, int]:
    """As _look_for_whole finds it: once for a mesh, since thousands of tensors lie on it."""
    found = _wholes.get(id(mesh))
    if found is None:
        found = _wholes[id(mesh)] = _look_for_whole(mesh)
        weakref.finalize(mesh, _wholes.pop, id(mesh), None)
    return found


def _look_for_whole(mesh: DeviceMesh) -> tuple[Mesh, int]:
    """The mesh that all ranks have in common which hold a tensor, and how many dimensions it has besides those of
    ``mesh``. That may be a slice of a larger one, as where layers are split over some ranks and batches over others:
    then every slice has a copy, and each rank knows its own only."""
    own = mesh.mesh.numpy()
    names = tuple(str(name) for name in mesh.mesh_dim_names or ())
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)().mesh.numpy()
    alone = Mesh(own.shape, tuple(own.reshape(-1).tolist()), names)
    if root.size == own.size or not np.isin(own, root).all():
        return alone, 0
    places = np.argwhere(np.isin(root, own))
    fixed = [dim for dim in range(root.ndim) if (places[:, dim] == places[0, dim]).all()]
    order = [dim for dim in range(root.ndim) if dim not in fixed] + fixed
    turned = root.transpose(order).reshape(*own.shape, *(root.shape[dim] for dim in fixed))
    slice_here = turned[(..., *(places[0, dim] for dim in fixed))]
    if not np.array_equal(slice_here, own):  # its ranks stand in another order there
        return alone, 0
    return Mesh(turned.shape, tuple(turned.reshape(-1).tolist()), names), len(fixed)


def _placement(placement: Any, value: DTensor, path: Path) -> Placement:
    dims = value.dim()
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise UnsupportedValue(
            f"{path.shown()} (key {path.text()!r}) has placement {placement}: its ranks hold summands, not the value. "
            "Redistribute it first, as in tensor.redistribute(placements=[Replicate()])"
        )
    dim = getattr(placement, "dim", None)
    split = getattr(placement, "split_factor", 1)
    kinds = ("Shard", "_StridedShard")
    if (
        type(placement).__name__ not in kinds
        or type(dim) is not int
        or type(split) is not int
        or not -dims <= dim < dims
    ):
        raise UnsupportedValue(
            f"{path.shown()} (key {path.text()!r}) has placement {placement}, which this release does not know: "
            "redistribute it to Shard or Replicate"
        )
    return dim % dims if split == 1 else (dim % dims, split)


def like(spread: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor that is laid out like another one, over this rank's part of it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )
