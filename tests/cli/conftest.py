"""Fixtures of the tests of the commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.support import make_store


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that is made once; tests get copies."""
    path = tmp_path_factory.mktemp("cli") / "store"
    make_store(path)
    return path


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    """A store of four commits that nobody holds."""
    return Path(shutil.copytree(template, tmp_path / "store"))
