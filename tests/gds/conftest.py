"""A kvikio that is not there, and one that only seems to be."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tierload.gds import availability

FAKE = Path(__file__).parent / "fake"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kvikio has been imported, before the test or after it; and there is a GPU."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvikio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(availability, "device_count", lambda: 1)


@pytest.fixture
def kvikio(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fake kvikio, where there is no nvidia-fs."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(availability, "_DRIVER", tmp_path / "nvidia-fs")
    found, why = availability.loaded()
    assert found is not None, why
    for name in ("", ".defaults", ".cufile_driver"):  # out again afterwards
        monkeypatch.setitem(sys.modules, f"kvikio{name}", sys.modules[f"kvikio{name}"])
    return found
