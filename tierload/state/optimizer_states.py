"""The state of one parameter in an optimizer: what becomes of it, and on which device it belongs.

What an optimizer does not have yet is made in the memory of its accelerator at once, and read right into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierload.state.compound_binding import is_handed_over
from tierload.state.footprints import footprint_of
from tierload.state.keys import Path
from tierload.state.members import nodes_of
from tierload.state.memory import no_memory
from tierload.state.nodes import tag_of
from tierload.state.spread_binding import fresh_for
from tierload.state.tensors import device_of, is_plain_tensor
from tierload.state.views import TensorView

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["State", "bind_state", "home_of"]

State = list[tuple[Any, Path, object, torch.Tensor | None]]
"""Name, place and node of each part of a parameter's state, and the tensor that is filled where there is one."""


def home_of(name: object, parameter: torch.Tensor, group: dict[str, Any]) -> torch.device:
    """The device that torch keeps a part of a state on: its parameter's, but for the count of steps, which stays with
    the processor unless kernels read it (torch.optim.Optimizer._process_value_according_to_param_policy)."""
    if name == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return parameter.device


def bind_state(
    binder: Binder, parameter: torch.Tensor, group: dict[str, Any], current: object, node: object, path: Path
) -> State | None:
    """The parts of a parameter's state; None where what is stored is no mapping. ``current`` is the state that it has,
    ``group`` the one that it will be in.

    Raises:
        MemoryError: There is no room for what is made.
        CorruptStore, UnsupportedValue: What is stored is damaged, or of a dtype that this torch lacks.
    """
    tag, content = tag_of(node)
    if tag not in ("d", "map", "odict", "ddict"):
        return None
    own = current if isinstance(current, dict) else {}
    own = own or _made(binder, parameter, group, nodes_of(tag, content) or {}, path)
    stored, rest = binder.bind_alike(own, tag, content, path)
    parts: State = [(name, path, None, old) for name, old in own.items() if name not in rest]
    for name, (place, inner) in stored.items():
        old = own.get(name)
        target = old if isinstance(old, torch.Tensor) and binder.fill_if_alike(old, inner, place) else None
        if target is None and name != "step":  # which torch keeps plain, also of a parameter of one element
            target = fresh_for(binder, parameter, inner, place)
        if target is None and tag_of(inner)[0] == "t" and home_of(name, parameter, group) == parameter.device:
            binder.followed.append(parameter)
        if target is None and is_handed_over(binder, None, inner, place):
            binder.reader.unfiltered(inner, place)
            binder.loaded.append(place)
        parts.append((name, place, inner, target))
    return parts


def _made(
    binder: Binder, parameter: torch.Tensor, group: dict[str, Any], nodes: dict[Any, Any], path: Path
) -> dict[Any, torch.Tensor]:
    """New tensors, by name, like those that are stored, where torch keeps them; ``binder`` fills them as if they had
    been there. Nothing for a parameter in the processor's memory, or in that of a device that the core knows no way to:
    what is read for it is the processor's first."""
    if not is_plain_tensor(parameter) or not device_of(parameter):
        return {}
    made: dict[Any, torch.Tensor] = {}
    for name, node in nodes.items():
        tag, content = tag_of(node)
        view = binder.reader.view(content, path.child(name)) if tag == "t" else None
        if view is not None and _is_all_of_its_chunk(binder, view):
            with no_memory(binder.reader.memory.row(view.chunk)[0]):
                made[name] = _empty(view, home_of(name, parameter, group))
    binder.made |= {id(tensor): tensor for tensor in made.values()}
    return made


def _is_all_of_its_chunk(binder: Binder, view: TensorView) -> bool:
    """Whether a chunk can be read right into a plain tensor of this view's shape and strides."""
    if view.conj or view.neg or view.grad or view.kind:
        return False
    if view.whole:
        return True
    footprint = footprint_of(0, view.shape, view.stride, view.row.size)
    nbytes = binder.reader.memory.row(view.chunk)[0].nbytes
    return footprint.dense and not footprint.overlapping and footprint.nbytes == nbytes


def _empty(view: TensorView, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(view.shape, view.stride, dtype=view.row.torch, device=device)
