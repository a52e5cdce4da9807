"""A crash-safe, verified, deduplicating checkpoint store for PyTorch.

Names are imported when they are first used, so that ``tierload.rescue`` and ``tierload --help`` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierload.api import (
        Guard,
        HotStart,
        PendingSave,
        Store,
        async_save,
        guard,
        hot_start,
        load,
        open,
        prepare,
        rollback,
        save,
    )
    from tierload.convert import ConvertReport, export_state, import_state
    from tierload.errors import (
        AcceleratorError,
        CommitDropped,
        CommitNotFound,
        CorruptFile,
        CorruptPage,
        CorruptStore,
        HotStartClosed,
        HotStartTimeout,
        InvalidRequest,
        KeyMismatch,
        RankFailed,
        RankLost,
        RanksDisagree,
        SaveCancelled,
        SaveSkipped,
        SaveTimeout,
        StoreBusy,
        StoreFenced,
        StoreIOError,
        StoreNotFound,
        StorePoisoned,
        TierloadError,
        TornSave,
        UnsupportedFormat,
        UnsupportedValue,
    )
    from tierload.hooks.session import Session
    from tierload.settings import Settings
    from tierload.state import RNG, File, Folder, register_type
    from tierload.types import (
        Balance,
        Change,
        ChunkInfo,
        CollectReport,
        Commit,
        Damage,
        Difference,
        LoadReport,
        Pacing,
        RollbackPlan,
        SaveProgress,
        SaveReport,
        ShardInfo,
        VerifyReport,
    )

__version__ = "0.1.0"

__all__ = [
    "RNG",
    "AcceleratorError",
    "Balance",
    "Change",
    "ChunkInfo",
    "CollectReport",
    "Commit",
    "CommitDropped",
    "CommitNotFound",
    "ConvertReport",
    "CorruptFile",
    "CorruptPage",
    "CorruptStore",
    "Damage",
    "Difference",
    "File",
    "Folder",
    "Guard",
    "HotStart",
    "HotStartClosed",
    "HotStartTimeout",
    "InvalidRequest",
    "KeyMismatch",
    "LoadReport",
    "Pacing",
    "PendingSave",
    "RankFailed",
    "RankLost",
    "RanksDisagree",
    "RollbackPlan",
    "SaveCancelled",
    "SaveProgress",
    "SaveReport",
    "SaveSkipped",
    "SaveTimeout",
    "Session",
    "Settings",
    "ShardInfo",
    "Store",
    "StoreBusy",
    "StoreFenced",
    "StoreIOError",
    "StoreNotFound",
    "StorePoisoned",
    "TierloadError",
    "TornSave",
    "UnsupportedFormat",
    "UnsupportedValue",
    "VerifyReport",
    "async_save",
    "export_state",
    "guard",
    "hot_start",
    "import_state",
    "load",
    "open",
    "prepare",
    "register_type",
    "rollback",
    "save",
]

# Which room a name lives in; the other ones are errors.
_ROOMS = {
    name: room
    for room, names in {
        "api": "Guard HotStart PendingSave Store async_save guard hot_start load open prepare rollback save",
        "convert": "ConvertReport export_state import_state",
        "hooks.session": "Session",
        "settings": "Settings",
        "state": "RNG File Folder register_type",
        "types": "Balance Change ChunkInfo CollectReport Commit Damage Difference LoadReport Pacing RollbackPlan "
        "SaveProgress SaveReport ShardInfo VerifyReport",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"tierload.{_ROOMS.get(name, 'errors')}"), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
