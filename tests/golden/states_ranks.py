"""What the golden stores of several ranks hold. Nothing here may ever change, as in states.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.golden.states import floats, pattern

RANKS = 2
STEPS = (1, 2, 3)
NEW_OWN, NEW_CUT = 2, 3  # from this step on rank 1 has other own values; tensors are cut in columns


def whole(step: int) -> dict[str, Any]:
    """What all ranks have, without its layout."""
    return {
        "rows": floats(37 * 40, 1).reshape(37, 40),
        "uneven": floats(3 * 5, 2).reshape(3, 5),
        "copies": floats(400, 3),
        "bulk": floats(4500, 4).reshape(90, 50),
        "half": floats(50, 5).to(torch.bfloat16),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "numbers": [0, 2**80, 1.5, float("inf"), None, (1, "é")],
        "late": step >= NEW_CUT,
    }


def own(rank: int, step: int) -> dict[str, Any]:
    """What is a rank's own."""
    seed = 100 * rank + (step if step >= NEW_OWN and rank == 1 else 0)
    return {"noise": pattern(1000, seed), "position": seed}


def state_of_rank(rank: int, ranks: int, step: int) -> dict[str, Any]:
    """What a rank saves: tensors spread over rows or columns, copies, and references between its own and the rest."""
    line, grid = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (1, ranks))
    cut = Shard(1 if step >= NEW_CUT else 0)
    state = whole(step)
    listed = [1, [2]]
    return state | {
        "rows": _spread(state["rows"], line, cut),
        "uneven": _spread(state["uneven"], grid, Shard(0), Shard(0)),
        "copies": _spread(state["copies"], grid, Shard(0), Replicate()),
        "listed": listed,
        "own": own(rank, step) | {"listed": listed},
    }


def expected_of_rank(rank: int, step: int) -> dict[str, Any]:
    """What one process gets of it that asks for the own values of a rank."""
    listed = [1, [2]]
    return whole(step) | {"listed": listed, "own": own(rank, step) | {"listed": listed}}


def _spread(tensor: torch.Tensor, mesh: Any, *placements: Any) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
