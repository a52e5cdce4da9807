"""Fixtures of the tests of other formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.stores import let_go


@pytest.fixture(autouse=True)
def _let_go(tmp_path: Path) -> Iterator[None]:
    """Stores that a test imported into are closed with it."""
    yield
    let_go(tmp_path)
