"""The golden stores that several ranks have written: each later release reads them byte for byte, and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.golden.make import copied, settings
from tests.golden.make_ranks import expect
from tests.golden.states_ranks import NEW_OWN, RANKS, STEPS, expected_of_rank, state_of_rank
from tests.ranks.world import results
from tests.state.alike import assert_alike
from tierload import Store, rescue

GOLDEN = sorted(path.name for path in Path(__file__).parent.glob("ranks-*"))


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return copied(request.param, tmp_path)


def test_the_first_one_is_there() -> None:
    assert "ranks-1" in GOLDEN
    size = sum(path.stat().st_size for path in (Path(__file__).parent / "ranks-1").rglob("*") if path.is_file())
    assert size < 200_000


def test_it_is_read_byte_for_byte(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    with tierload.open(path) as store:
        assert not store.warnings
        assert json.loads(json.dumps(expect(store))) == expected
        for step in STEPS:
            for rank in range(RANKS):
                found: Any = store.load(tag=f"step {step}", rank=rank)
                assert_alike(found, expected_of_rank(rank, step))
                assert found["own"]["listed"] is found["listed"]
        report = store.verify(full=True)
    assert report.ok, report.damages
    assert report.pages > 10


def test_ranks_go_on_with_it(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    written = results(RANKS, _saved_again, str(path))
    assert written == [0] * RANKS  # the head is the same state: nothing is written again
    with tierload.open(path) as store:
        assert store.diff("step 2", 4).changed == ()
        assert [commit.id for commit in store.commits()][1:] == [commit["id"] for commit in expected["commits"]]
        assert store.verify(full=True).ok


def _saved_again(rank: int, ranks: int, path: str) -> int:
    state = state_of_rank(rank, ranks, 1)
    with Store(path, mode="w", settings=settings("fast")) as store:
        store.load(into=state)
        assert_alike(state["own"], expected_of_rank(rank, NEW_OWN)["own"])
        return store.save(state, step=4).written_bytes


def test_one_process_goes_on_with_it(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    with Store(path, mode="w", settings=settings("fast")) as store:
        store.save(store.load() | {"new": torch.arange(9)}, step=100)  # type: ignore[operator]
        assert store.diff(expected["commits"][0]["id"], 100).added == ("new",)
        for step in STEPS:
            store.rollback(f"step {step}")
            assert_alike(store.load(rank=1), expected_of_rank(1, step))
        store.collect(keep=1)
        assert len(store.commits()) >= len(STEPS)
    with tierload.open(path) as store:
        assert store.verify(full=True).ok


def test_the_rescue_reader_agrees(golden: tuple[Path, dict[str, Any]]) -> None:
    path, _ = golden
    for step in STEPS:
        found = rescue.read(path, tag=f"step {step}")
        for rank in range(RANKS):
            wanted = expected_of_rank(rank, step)
            tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
            own = {key: value for key, value in wanted["own"].items() if isinstance(value, torch.Tensor)}
            tensors |= {f"~own/{rank}/own/{key}": value for key, value in own.items()}
            for key, tensor in tensors.items():
                dtype, shape, data = found[key]
                assert (f"torch.{dtype}", shape) == (str(tensor.dtype), tuple(tensor.shape))
                raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
                assert data == raw.numpy().tobytes(), key
        assert len(found) == 7 + RANKS


def test_nothing_is_written_by_reading(golden: tuple[Path, dict[str, Any]]) -> None:
    path, _ = golden
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with tierload.open(path) as store:
        store.verify(full=True)
        store.load(rank=1)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
