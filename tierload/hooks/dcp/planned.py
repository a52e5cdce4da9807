"""The state that a planner of DCP is to save, as it was before it was flattened."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tierload.errors import InvalidRequest, UnsupportedValue

__all__ = ["state_of"]

_RESOLVING = ("resolve_data", "lookup_object", "transform_object")


def state_of(planner: SavePlanner) -> dict[str, Any]:
    """The nested state: tensors as they are (parts of what is spread over ranks as DTensors), other values themselves.
    Where a planner has ways of its own to give the data of a key, it is asked for it.

    Raises:
        InvalidRequest: The planner does not keep the state that it was set up with.
        UnsupportedValue: A value is of no kind that can be stored; it names the key.
    """
    flat = getattr(planner, "state_dict", None)
    if not isinstance(flat, Mapping):
        raise InvalidRequest(
            f"{type(planner).__qualname__} has no state_dict, so there is no knowing what it is to save: derive it "
            "from torch.distributed.checkpoint.DefaultSavePlanner"
        )
    mappings = getattr(planner, "mappings", None) or {}
    own = any(getattr(type(planner), name, None) is not getattr(DefaultSavePlanner, name) for name in _RESOLVING)
    state: dict[str, Any] = {}
    for fqn, value in flat.items():
        whole = _as_dtensor(fqn, value) if isinstance(value, ShardedTensor) else value
        set_element(state, mappings.get(fqn, (fqn,)), _resolved(planner, fqn, whole) if own else whole)
    return state


def _resolved(planner: SavePlanner, fqn: str, value: Any) -> Any:
    """What the planner makes of a value."""
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return value  # nothing of it is here
    (item,) = _create_write_items(fqn, value)
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        data.seek(0)
        try:
            return torch.load(data, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise UnsupportedValue(
                f"{fqn!r}: what {type(planner).__qualname__} gives for it is not what torch.save makes of plain "
                f"values, so it cannot be stored: {str(error).splitlines()[0]}"
            ) from error
    assert isinstance(data, torch.Tensor)
    if not isinstance(value, DTensor):
        return data
    if data.shape != value.to_local().shape:
        raise UnsupportedValue(
            f"{fqn!r}: {type(planner).__qualname__} gives a part of shape {tuple(data.shape)} where this rank's is "
            f"{tuple(value.to_local().shape)}"
        )
    return _over(data, value.device_mesh, value.placements, value.shape)


def _as_dtensor(fqn: str, value: ShardedTensor) -> DTensor:
    """A sharded tensor whose shards are those of ``torch.chunk``, one a rank of its group, as a DTensor.

    Raises:
        UnsupportedValue: They are not.
    """
    ranks = dist.get_process_group_ranks(value._process_group)
    shape, shards = value.size(), value.metadata().shards_metadata
    for dim, size in enumerate(shape):
        step = -(-size // len(ranks))
        begins = {rank: number * step for number, rank in enumerate(ranks) if number * step < size}
        expected = {
            rank: (
                tuple(begin if each == dim else 0 for each in range(len(shape))),
                tuple(min(step, size - begin) if each == dim else shape[each] for each in range(len(shape))),
            )
            for rank, begin in begins.items()
        }
        if expected == {
            shard.placement.rank(): (tuple(shard.shard_offsets), tuple(shard.shard_sizes))
            for shard in shards
            if shard.placement is not None and 0 not in shard.shard_sizes
        }:
            break
    else:
        raise UnsupportedValue(
            f"{fqn!r} is a ShardedTensor whose shards are not one a rank, as torch.chunk cuts it: use DTensors (FSDP "
            "with device_mesh, fully_shard), which can be spread in any way"
        )
    local = [shard.tensor for shard in value.local_shards()]
    empty = [0 if each == dim else size for each, size in enumerate(shape)]
    part = local[0] if local else torch.empty(empty, dtype=value.dtype)
    mesh = DeviceMesh(part.device.type, ranks, _init_backend=False)
    return _over(part, mesh, (Shard(dim),), shape)


def _over(part: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
