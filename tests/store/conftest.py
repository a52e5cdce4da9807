"""Fixtures of the tests of whole stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.support import ram_folder


@pytest.fixture
def ram() -> Iterator[Path]:
    """An empty folder in memory."""
    with ram_folder() as folder:
        yield folder
