"""What a probe found of kvikio on a file system, and which way saves and loads of a GPU's tensors go by that."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, Self

__all__ = ["Choice", "ProbeResult", "choose"]

_TIE = 1.05  # within this the ring stays: it has fewer moving parts


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What kvikio did between a file system and a GPU.

    ``mode`` is ``"gds"``, ``"compat"``, or empty where it did nothing; ``why`` says why it is not ``"gds"``. Rates are
    bytes a second, until durable and from the device, 0 where nothing was measured. ``kvikio`` and ``cufile`` are
    versions. ``again`` says that it failed for a reason that may be gone the next time, such as a full disk.
    """

    mode: str = ""
    why: str = ""
    write: float = 0.0
    read: float = 0.0
    kvikio: str = ""
    cufile: str = ""
    again: bool = False

    @classmethod
    def of(cls, found: object) -> Self | None:
        """The result that somebody wrote down, or None if no probe can have given it: it may be anything."""
        if not isinstance(found, dict) or found.keys() != {field.name for field in fields(cls)}:
            return None
        texts = all(isinstance(found[name], str) for name in ("mode", "why", "kvikio", "cufile"))
        rates = [found["write"], found["read"]]
        numbers = all(isinstance(rate, float) and 0 <= rate < math.inf for rate in rates)
        if not (texts and numbers and isinstance(found["again"], bool)):
            return None
        result = cls(**found)
        known = {"gds": all(rates), "compat": all(rates) and result.why, "": result.why}
        return result if known.get(result.mode) else None

    @property
    def path(self) -> str:
        """The way that pages took, as ``GdsFiles.path`` says it; empty if none."""
        return f"compat ({self.why})" if self.mode == "compat" else self.mode


@dataclass(frozen=True, slots=True)
class Choice:
    """Which way saves and loads go: through kvikio, or the ring of pinned memory. ``why`` is for a commit's record and
    a load's report."""

    save: Literal["gds", "ring"]
    load: Literal["gds", "ring"]
    why: str


def choose(found: ProbeResult, ring_write: float, ring_read: float) -> Choice:
    """The faster way in each direction; the ring where it is as fast within 5 %, and where there is no direct way.

    ``ring_write`` and ``ring_read`` are the ring's rates on the same file system, in bytes a second.
    """
    rates = f"wrote {_of(found.write, ring_write)} and read {_of(found.read, ring_read)} GB/s"
    if found.mode == "compat":
        return Choice("ring", "ring", f"ring: {found.why}, kvikio in compatibility mode {rates}")
    if found.mode != "gds":
        return Choice("ring", "ring", f"ring: {found.why}")
    save = _faster(found.write, ring_write)
    load = _faster(found.read, ring_read)
    taken = save if save == load else f"{save} saves, {load} loads"
    return Choice(save, load, f"{taken}: kvikio {rates}")


def _faster(direct: float, ring: float) -> Literal["gds", "ring"]:
    return "gds" if direct > _TIE * ring else "ring"


def _of(rate: float, ring: float) -> str:
    return f"{rate / 1e9:.1f} of {ring / 1e9:.1f}"
