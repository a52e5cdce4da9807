"""Frozen values that the rooms hand to one another. No behaviour, no torch."""

from tierload.types.commits import (
    Change,
    CollectReport,
    Commit,
    Damage,
    Difference,
    Pacing,
    RollbackPlan,
    SaveReport,
    VerifyReport,
)
from tierload.types.progress import LiveSave, LiveStatus, SaveProgress
from tierload.types.tensors import ChunkInfo, ChunkTable, Destinations, FlatState, LoadReport

__all__ = [
    "Change",
    "ChunkInfo",
    "ChunkTable",
    "CollectReport",
    "Commit",
    "Damage",
    "Destinations",
    "Difference",
    "FlatState",
    "LiveSave",
    "LiveStatus",
    "LoadReport",
    "Pacing",
    "RollbackPlan",
    "SaveProgress",
    "SaveReport",
    "VerifyReport",
]
