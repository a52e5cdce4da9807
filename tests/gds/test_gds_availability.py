"""Why there is no direct storage, in every way in which there can be none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tierload import gds
from tierload.errors import InvalidRequest
from tierload.gds import availability


def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A kvikio that runs ``code`` when it is imported."""
    (tmp_path / "kvikio.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


def test_no_kvikio(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert gds.refusal() == gds.absence() == "no kvikio: pip install tierload[gds]"
    assert gds.version() == ""
    assert gds.facts() == ()
    with pytest.raises(InvalidRequest, match="no kvikio"):
        gds.GdsFiles()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise RuntimeError('no libcuda.so.1\\nat: shim.cpp')", "RuntimeError: no libcuda.so.1"),
        ("raise OSError('libkvikio.so: cannot open shared object file')", "OSError: libkvikio.so: cannot open shared"),
        ("raise ImportError('undefined symbol: cuFileRead')", "ImportError: undefined symbol: cuFileRead"),
        ("raise AttributeError", "AttributeError"),
        ("import rapids_logger_that_is_missing", "No module named 'rapids_logger_that_is_missing'"),
    ],
)
def test_a_kvikio_that_cannot_be_imported(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    pretend(tmp_path, monkeypatch, code)
    assert gds.refusal().startswith(f"kvikio cannot be imported: {why}")
    assert "\n" not in gds.refusal()
    assert gds.version() == ""


def test_no_gpu(kvikio: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "device_count", lambda: 0)
    assert gds.refusal() == gds.absence() == "no GPU"


@pytest.mark.parametrize("version", [(0, 0), (1, 15)])
def test_without_the_driver_nothing_is_asked_of_cufile(
    kvikio: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(kvikio.cufile_driver, "version", version)
    monkeypatch.setattr(kvikio.cufile_driver, "asked", 0)
    assert gds.refusal() == "no nvidia-fs"
    assert gds.absence() == ""
    assert kvikio.cufile_driver.asked == 0


@pytest.mark.parametrize(
    ("version", "compat", "why"),
    [((0, 0), True, "no libcufile"), ((1, 15), True, "compat mode"), ((1, 15), False, "")],
)
def test_with_the_driver(
    kvikio: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], compat: bool, why: str
) -> None:
    availability._DRIVER.mkdir()
    (availability._DRIVER / "version").write_text("version: 2.28.2\n")
    monkeypatch.setattr(kvikio.cufile_driver, "version", version)
    monkeypatch.setattr(kvikio.defaults, "compat_preferred", compat)
    assert gds.refusal() == why
    assert dict(gds.facts()) == {
        "kvikio": "26.10.00",
        "kvikio's mode": f"compat ({why})" if why else "gds",
        "kvikio's tasks": "8 threads, 8 MiB each",
        "nvidia-fs": "2.28.2",
    }
