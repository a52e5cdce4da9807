"""The order of things: what happens, one after the other, in a save, a load, a rollback, a verification."""

from tierload.engine.store import Store

__all__ = ["Store"]
