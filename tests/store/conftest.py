"""Fixtures of the tests of whole stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierload
from tests.store.support import ram_folder


@pytest.fixture
def ram() -> Iterator[Path]:
    """An empty folder in memory."""
    with ram_folder() as folder:
        yield folder


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a file system with direct I/O."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        with tierload.Store(Path(folder) / "probe", mode="w") as store:
            if store.io != "direct":
                pytest.skip(store.io)
        yield Path(folder)
