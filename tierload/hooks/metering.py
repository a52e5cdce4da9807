"""The heat meter of a run that a hook looks after: of its model and its optimizer, or one that the program made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tierload.engine import Store
from tierload.errors import InvalidRequest, KeyMismatch
from tierload.state.wrappers import BareNames

if TYPE_CHECKING:  # what imports a meter is asked for only where there is one
    from tierload.heat import HeatMeter

__all__ = ["HEAT", "check", "meter_of", "stored_heat"]

HEAT = "heat"
"""What a meter has measured stands under this name in a commit."""


def check(heat: object) -> None:
    """Refuses what is neither a meter nor whether to make one.

    Raises:
        InvalidRequest: It is nothing of that.
    """
    if type(heat) is bool:
        return
    from tierload.heat import HeatMeter

    if not isinstance(heat, HeatMeter):
        raise InvalidRequest(f"heat is {heat!r}; use True, or a tierload.heat.HeatMeter")


def meter_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> HeatMeter:
    """A meter that knows parameters by the names that they have without wrappers, so that its state is the same with
    DistributedDataParallel, torch.compile and without them."""
    from tierload.heat import HeatMeter

    named = list(model.named_parameters(remove_duplicate=False))
    bare = BareNames(model).unique([name for name, _ in named])
    return HeatMeter(model, optimizer, parameters={bare[name]: parameter for name, parameter in named})


def stored_heat(store: Store, **which: Any) -> Mapping[str, Any] | None:
    """The state of the meter in a commit (the newest); None where it has none."""
    try:
        found: Any = store.load(keys=HEAT, **which)
    except KeyMismatch:
        return None
    state: Mapping[str, Any] = found[HEAT]
    return state
