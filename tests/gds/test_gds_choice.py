"""Who takes which way, and what is remembered of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from tierload.engine import devices
from tierload.gds import Choice, ProbeResult, availability, choose

GB = 1e9
COMPAT = ProbeResult("compat", "no nvidia-fs", 1.5 * GB, 1.7 * GB, "26.10.00")
DIRECT = ProbeResult("gds", "", 6.0 * GB, 8.0 * GB, "26.10.00", "1.15")


@pytest.mark.parametrize(
    ("found", "ring", "save", "load", "why"),
    [
        (DIRECT, (2.0, 2.0), "gds", "gds", "gds: kvikio wrote 6.0 of 2.0 and read 8.0 of 2.0 GB/s"),
        (DIRECT, (2.0, 9.0), "gds", "ring", "gds saves, ring loads: kvikio wrote 6.0 of 2.0 and read 8.0 of 9.0 GB/s"),
        (DIRECT, (7.0, 5.0), "ring", "gds", "ring saves, gds loads: kvikio wrote 6.0 of 7.0 and read 8.0 of 5.0 GB/s"),
        (DIRECT, (5.8, 7.9), "ring", "ring", "ring: kvikio wrote 6.0 of 5.8 and read 8.0 of 7.9 GB/s"),  # ties
        (DIRECT, (5.7, 7.6), "gds", "gds", "gds: kvikio wrote 6.0 of 5.7 and read 8.0 of 7.6 GB/s"),  # just none
        (DIRECT, (math.inf, math.inf), "ring", "ring", "ring: kvikio wrote 6.0 of inf and read 8.0 of inf GB/s"),
        (
            COMPAT,
            (2.1, 2.0),
            "ring",
            "ring",
            "ring: no nvidia-fs, kvikio in compatibility mode wrote 1.5 of 2.1 and read 1.7 of 2.0 GB/s",
        ),
        # Faster, and still not what was to be proven.
        (
            COMPAT,
            (0.1, 0.1),
            "ring",
            "ring",
            "ring: no nvidia-fs, kvikio in compatibility mode wrote 1.5 of 0.1 and read 1.7 of 0.1 GB/s",
        ),
        (ProbeResult(why="no GPU"), (2.0, 2.0), "ring", "ring", "ring: no GPU"),
    ],
)
def test_the_faster_way_is_taken(found: ProbeResult, ring: tuple[float, float], save: str, load: str, why: str) -> None:
    chosen = choose(found, ring[0] * GB, ring[1] * GB)
    assert chosen == Choice(save, load, why)  # type: ignore[arg-type]


FORGED = [
    None,
    3,
    [],
    {},
    {"mode": "gds"},
    asdict(DIRECT) | {"colour": "red"},
    asdict(DIRECT) | {"mode": "fast"},
    asdict(DIRECT) | {"write": 0.0},
    asdict(DIRECT) | {"read": -1.0},
    asdict(DIRECT) | {"read": math.inf},
    asdict(DIRECT) | {"read": math.nan},
    asdict(DIRECT) | {"write": "fast"},
    asdict(DIRECT) | {"again": 1},
    asdict(DIRECT) | {"kvikio": None},
    asdict(COMPAT) | {"why": ""},
    asdict(ProbeResult()),
]


@pytest.fixture
def memory(kvikio: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tierload" / "devices.json"


@pytest.mark.parametrize("content", FORGED, ids=str)
def test_only_what_a_probe_can_have_found_is_believed(memory: Path, tmp_path: Path, content: object) -> None:
    assert ProbeResult.of(content) is None
    memory.parent.mkdir(parents=True)
    memory.write_text(json.dumps({devices._way(tmp_path): content}))
    assert devices.remembered_way(tmp_path) is None


def test_a_result_is_remembered_for_a_file_system_a_kvikio_and_what_is_in_its_way(
    memory: Path, tmp_path: Path, kvikio: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.remembered_way(tmp_path) is None
    for found in (COMPAT, DIRECT, ProbeResult(why="kvikio did not answer within 20 s")):
        assert devices.remember_way(tmp_path, found) == devices.remembered_way(tmp_path) == found
    with monkeypatch.context() as other:
        other.setattr(kvikio, "__version__", "26.12.00")
        assert devices.remembered_way(tmp_path) is None
    availability._DRIVER.mkdir()  # somebody has loaded the driver
    assert devices.remembered_way(tmp_path) is None
    devices.remember_way(tmp_path, DIRECT)
    assert devices.remembered_way(tmp_path) == DIRECT


def test_a_failure_that_passes_is_not_remembered(memory: Path, tmp_path: Path) -> None:
    full = replace(COMPAT, mode="", again=True)
    assert devices.remember_way(tmp_path, full) == full
    assert not memory.exists()


def test_rates_of_the_device_stay_beside_it(memory: Path, tmp_path: Path) -> None:
    memory.parent.mkdir(parents=True)
    memory.write_text(json.dumps({"another": 1}))
    devices.remember_way(tmp_path, COMPAT)
    assert json.loads(memory.read_text()).keys() == {"another", devices._way(tmp_path)}
