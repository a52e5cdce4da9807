"""Frozen values that the rooms hand to one another. No behaviour, no torch."""

from tierload.types.commits import (
    Change,
    CollectReport,
    Commit,
    Damage,
    Difference,
    RollbackPlan,
    SaveReport,
    VerifyReport,
)
from tierload.types.tensors import ChunkInfo, ChunkSource, Destination, FlatState, LoadReport

__all__ = [
    "Change",
    "ChunkInfo",
    "ChunkSource",
    "CollectReport",
    "Commit",
    "Damage",
    "Destination",
    "Difference",
    "FlatState",
    "LoadReport",
    "RollbackPlan",
    "SaveReport",
    "VerifyReport",
]
