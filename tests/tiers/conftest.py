"""Fixtures of the tests of tiers."""

from __future__ import annotations

from tests.cases.conftest import one_thread

__all__ = ["one_thread"]
