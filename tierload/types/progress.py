"""Values that say how far saves in the background are."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LiveSave", "LiveStatus", "SaveProgress"]


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """How far a save is: ``phase`` in a word or two, and raw bytes that were copied, that were written (or found in the
    store already), and that there are in all."""

    phase: str
    staged_bytes: int
    written_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LiveSave:
    """A save in flight in another process: its step, and the seconds since its call."""

    step: int | None
    seconds: float
    progress: SaveProgress


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """What the writer of a store had in flight at ``time`` (seconds since 1970); ``skipped`` saves were left out."""

    host: str
    pid: int
    time: float
    skipped: int
    saves: tuple[LiveSave, ...]
