"""What a save takes from a heat meter: how hot each tensor of the state is at the moment of the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierload import _native
from tierload.engine.loading import table_of
from tierload.errors import InvalidRequest
from tierload.state import ParameterNames, read_heat
from tierload.types import Commit, HeatTable

if TYPE_CHECKING:
    from tierload.heat import HeatMeter

__all__ = ["heat_in", "table_of_meter"]


def table_of_meter(meter: HeatMeter | None, state: object, page_bytes: int) -> HeatTable | None:
    """The heat of the meter's parameters by their keys in ``state``; of those that are not in it, none.

    Raises:
        InvalidRequest: It is no heat meter.
    """
    if meter is None:
        return None
    from tierload.heat import HeatMeter  # whoever has a meter has imported it; others need not wait for it

    if not isinstance(meter, HeatMeter):
        raise InvalidRequest(
            f"heat= is a {type(meter).__name__}; give the tierload.heat.HeatMeter that follows the training"
        )
    names = ParameterNames(state)
    return meter.table(lambda parameter: next(iter(names.of(parameter)), None), page_bytes)


def heat_in(commit: Commit, manifest: _native.Manifest) -> HeatTable | None:
    """The heat in a commit, by the first of its shards."""
    document = manifest.state.tobytes()
    if b'"heat"' not in document:
        return None  # as most are; otherwise the word may stand in a text
    if commit.ranks > 1:
        return read_heat(document)
    chunks = table_of(manifest).chunks
    return read_heat(document, chunks.keys_at(range(len(chunks))))
