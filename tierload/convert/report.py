"""What a conversion did: the value that both directions return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierload.types import Commit

__all__ = ["ConvertReport"]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of ``export_state`` or ``import_state``; every tensor was compared before it was made.

    ``files`` were written, or read; ``tensors`` counts the distinct ones and ``bytes`` is their size; ``values`` counts
    what is no tensor and was kept. ``ties`` maps each further name of a tensor to the one that it is stored under.
    ``own`` are the keys of values that each rank of a commit by several has of its own: those of rank 0 were taken.
    ``changed`` are keys whose value was kept in another form, ``left_out`` keys that the format cannot hold, each with
    the reason. ``skipped`` are files of an imported folder that were not read.
    """

    format: str
    files: tuple[str, ...]
    commit: Commit
    tensors: int
    bytes: int
    values: int = 0
    ties: Mapping[str, str] = field(default_factory=dict)
    changed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
