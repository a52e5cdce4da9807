"""The order of things: what happens, one after the other, in a save, a load, a rollback, a verification."""

from tierload.engine.guards import Guard, guard, guarded
from tierload.engine.hot_start import HotProgress, HotStart, Stage
from tierload.engine.job import place, saves_together
from tierload.engine.pending import PendingSave
from tierload.engine.reading import CommitReader
from tierload.engine.store import Store
from tierload.engine.values import tags_of

__all__ = [
    "CommitReader",
    "Guard",
    "HotProgress",
    "HotStart",
    "PendingSave",
    "Stage",
    "Store",
    "guard",
    "guarded",
    "place",
    "saves_together",
    "tags_of",
]
