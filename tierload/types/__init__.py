"""Frozen values that the rooms hand to one another. No behaviour, no torch."""

from tierload.types.commits import (
    Balance,
    Change,
    CollectReport,
    Commit,
    Damage,
    Difference,
    Pacing,
    RollbackPlan,
    SaveReport,
    ShardInfo,
    VerifyReport,
)
from tierload.types.heat import HeatTable
from tierload.types.meshes import Box, Layout, Mesh, Placement, Sharded
from tierload.types.progress import LiveSave, LiveStatus, SaveProgress
from tierload.types.tensors import (
    BoxDestination,
    ChunkInfo,
    ChunkTable,
    Destinations,
    FlatState,
    LoadReport,
    PartDestination,
)

__all__ = [
    "Balance",
    "Box",
    "BoxDestination",
    "Change",
    "ChunkInfo",
    "ChunkTable",
    "CollectReport",
    "Commit",
    "Damage",
    "Destinations",
    "Difference",
    "FlatState",
    "HeatTable",
    "Layout",
    "LiveSave",
    "LiveStatus",
    "LoadReport",
    "Mesh",
    "Pacing",
    "PartDestination",
    "Placement",
    "RollbackPlan",
    "SaveProgress",
    "SaveReport",
    "ShardInfo",
    "Sharded",
    "VerifyReport",
]
