"""Compound tensors on their way into the document."""

from __future__ import annotations

import json
from typing import Any

import torch

from tierload.state.assembly import assemble
from tierload.state.compounds import LAYOUTS, take_apart
from tierload.state.containers import Parts
from tierload.state.keys import Part, Path
from tierload.state.scalars import Unwritable
from tierload.state.texts import quoted

__all__ = ["encode"]

_VALIDATED = {*LAYOUTS.values(), "jagged"}
"""Forms whose indices or offsets are looked at, as a load does; putting these together copies nothing."""


def encode(tensor: torch.Tensor, path: Path) -> Parts:
    """The parts of a compound tensor, and what it is beside them.

    Raises:
        Unwritable: It cannot be stored, or it contradicts itself and could not be loaded.
    """
    compound = take_apart(tensor)
    if compound.form in _VALIDATED:
        try:
            assemble(compound.form, compound.facts, compound.parts)
        except (ValueError, RuntimeError) as error:
            raise Unwritable(f"its parts contradict each other: {error}") from error
    facts: dict[str, Any] = dict(compound.facts)
    if isinstance(tensor, torch.nn.Parameter):
        facts["kind"] = "parameter"
    if tensor.requires_grad:
        facts["grad"] = True
    members = "".join(f",{quoted(name)}:{json.dumps(fact, separators=(',', ':'))}" for name, fact in facts.items())
    parts: Parts = [f'{{"compound":{{"form":"{compound.form}"{members}']
    if compound.form == "subclass":
        parts += [',"context":', (compound.context, path.inner())]
    lead = ',"parts":['
    for name, part in compound.parts.items():
        parts += [f"{lead}[{quoted(name)},", (part, path.child(Part(name)))]
        lead = "],"
    return [*parts, "]]}}" if compound.parts else f"{lead}]}}}}"]
