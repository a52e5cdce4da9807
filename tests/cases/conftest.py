"""Fixtures of the tests of public cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cases.stores import let_go
from tests.store.support import ram_folder


@pytest.fixture
def ram() -> Iterator[Path]:
    """An empty folder in memory; stores in it that this process came to hold are closed after the test."""
    with ram_folder() as folder:
        yield folder
        let_go(folder)


@pytest.fixture
def store(ram: Path) -> Path:
    """Where a store may be made."""
    return ram / "store"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads spin while they wait for one another, which costs more than it brings on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
