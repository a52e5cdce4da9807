"""Loading into tensors that are spread over ranks: each rank fills its own part, whoever stored it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierload.state.dtypes import BY_DTYPE
from tierload.state.keys import Path
from tierload.state.nodes import tag_of
from tierload.state.sharding import is_spread, like, local_part, sharded
from tierload.state.tensors import device_of, is_within_reach
from tierload.state.views import TensorView
from tierload.types import PartDestination

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tierload.state.bind import Binder

__all__ = ["bind_spread", "copy_into", "fill_if_alike", "fresh_for", "matching_view"]


def bind_spread(binder: Binder, live: DTensor, node: object, path: Path, *, module: bool = False) -> bool:
    """Fill this rank's part of ``live`` with what is stored; whether it can be. What differs is reported. On meta it
    gets memory when it is part of a module."""
    if not binder.reader.wants(path):
        return False
    binder.meshes[id(live.device_mesh)] = live.device_mesh
    view = matching_view(binder, live, node, path)
    if view is None:
        return False
    local = local_part(live, path)
    if local.is_meta and not module:
        binder.problems.missing(
            path, "is on the meta device in the target, and part of no module; give it memory first"
        )
        return False
    if local.is_meta:
        fresh = torch.empty(local.shape, dtype=local.dtype, device=_device(live))
        _, local, chunk = binder.spread_materials.setdefault(id(live), (live, fresh, view.chunk))
        if chunk != view.chunk:
            binder.problems.unexpected(path, "shares memory with another key in the target, and not in the store")
            return False
    _fill(binder, live, local, view, path)
    binder.loaded.append(path)
    return True


def fill_if_alike(binder: Binder, live: DTensor, node: object, path: Path) -> bool:
    """Fill ``live`` when the store has a tensor of its shape and dtype for it; whether it has."""
    tag, content = tag_of(node)
    if tag != "t":
        return False
    view = binder.reader.view(content, path)
    alike = view.shape == tuple(live.shape) and view.row.torch is live.dtype
    return alike and bind_spread(binder, live, node, path)


def matching_view(binder: Binder, live: DTensor, node: object, path: Path) -> TensorView | None:
    """The stored tensor that is the whole of ``live``; None when it is not, which is reported."""
    tag, content = tag_of(node)
    if tag != "t":
        binder.mismatch("a tensor spread over ranks", node, path)
        return None
    view = binder.reader.view(content, path)
    if tuple(live.shape) != view.shape:
        binder.problems.shapes(path, f"has shape {tuple(live.shape)} in the target and {view.shape} in the store")
        return None
    return view if binder.same_dtype(live, view, path) else None


def fresh_for(binder: Binder, template: torch.Tensor, node: object, path: Path) -> torch.Tensor | None:
    """A new tensor, laid out like ``template``, that is filled with what is stored: None when the template is not
    spread over ranks, or what is stored is no tensor of its shape. No rank then holds the whole."""
    tag, content = tag_of(node)
    if not is_spread(template) or tag != "t":
        return None
    view = binder.reader.view(content, path)
    if view.shape != tuple(template.shape):
        return None
    binder.meshes[id(template.device_mesh)] = template.device_mesh
    part = local_part(template, path)
    device = _device(template) if part.is_meta else part.device
    local = torch.empty(part.shape, dtype=view.row.torch, device=device)
    _fill(binder, template, local, view, path)
    return like(template, local)


def _device(spread: DTensor) -> torch.device:
    """Where a part that is on meta will be."""
    return torch.device(spread.device_mesh.device_type)


def _fill(binder: Binder, live: DTensor, local: torch.Tensor, view: TensorView, path: Path) -> None:
    """Have ``local`` filled: directly where its elements are those of the store, else from a copy of this part."""
    whole = sharded(live, path)
    memory = binder.reader.memory
    if not (view.whole and view.shape == memory.row(view.chunk)[0].sizes):
        # A view of something larger, which is all read.
        stored = view.data(memory)
        binder.actions.append(lambda: copy_into(local, _slice(stored, live)))
        return
    plain = is_within_reach(local) and local.dtype is view.row.torch and not local.is_neg() and not local.is_conj()
    direct = plain and not view.conj and not view.neg
    part = local if direct else torch.empty(local.shape, dtype=view.row.torch, device="cpu")
    if part.numel():
        size = part.element_size()
        strides = tuple(step * size for step in part.stride())
        at, device = part.data_ptr(), device_of(part)
        binder.parts.append(PartDestination(view.chunk, whole, at, strides, size, part, device))
    if part is not local:
        binder.actions.append(lambda: copy_into(local, view.marked(part)))
    else:
        binder.touched.append(local)


def _slice(stored: torch.Tensor, live: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor."""
    from torch.distributed.tensor import distribute_tensor

    meta: Any = distribute_tensor(stored, live.device_mesh, live.placements, src_data_rank=None)
    with torch.no_grad():
        part: torch.Tensor = meta.to_local()
    return part


def copy_into(local: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements, converted where dtypes differ."""
    row = BY_DTYPE[local.dtype]
    with torch.no_grad():
        if row.is_shell:
            integers = torch.uint8 if row.size == 1 else torch.int16
            local, source = local.view(integers), source.view(integers)
        local.copy_(source)
