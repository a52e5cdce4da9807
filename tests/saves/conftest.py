"""The fixtures of the public cases."""

from tests.cases.conftest import one_thread, ram, store

__all__ = ["one_thread", "ram", "store"]
