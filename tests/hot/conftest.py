"""Fixtures of the tests of heat."""

from __future__ import annotations

from tests.cases.conftest import one_thread, ram, store

__all__ = ["one_thread", "ram", "store"]
