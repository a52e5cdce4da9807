"""The fixtures of the public cases, and stores that several files begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.conftest import one_thread, ram, store
from tests.cases.stores import SMALL, state_of
from tests.saves.failing import Failing
from tierload import Store, _native

__all__ = ["held", "one_thread", "ram", "store", "three"]


@pytest.fixture
def held(store: Path) -> Iterator[Failing]:
    """A store with a commit of number 0."""
    with Failing(store, _native.Faults()) as opened:
        opened.save(state_of(0), step=0)
        yield opened


@pytest.fixture
def three(store: Path) -> Iterator[Store]:
    """A store with commits of 1, 2 and 3."""
    with Store(store, mode="w", settings=SMALL) as opened:
        for number in (1, 2, 3):
            opened.save(state_of(number), step=number)
        yield opened
