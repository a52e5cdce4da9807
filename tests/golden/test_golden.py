"""Stores of every released format, as that release wrote them: each later one reads them byte for byte, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.golden.make import commits_of, copied, history_of, past_of
from tests.golden.states import describe, states
from tests.state.alike import assert_alike
from tierload import Store, rescue

GOLDEN = sorted(path.name for path in Path(__file__).parent.glob("format-*"))


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return copied(request.param, tmp_path)


def test_format_1_is_there() -> None:
    assert "format-1" in GOLDEN
    size = sum(path.stat().st_size for path in (Path(__file__).parent / "format-1").rglob("*") if path.is_file())
    assert size < 200_000


def test_every_commit_is_read_byte_for_byte(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    content = states()
    with tierload.open(path) as store:
        assert not store.warnings
        for commit, name in expected["loads"].items():
            loaded = store.load(commit=commit)
            assert describe(loaded) == expected["states"][name]
            assert_alike(loaded, content[name])
        report = store.verify(full=True)
    assert report.ok, report.damages
    assert report.pages > 10


def test_commits_tags_values_and_history_are_what_they_were(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    with tierload.open(path) as store:
        assert commits_of(store) == expected["commits"]
        assert {name: commit.id for name, commit in store.tags().items()} == expected["tags"]
        assert describe(store.recorded()) == expected["values"]
        assert history_of(store) == expected["history"]
        assert past_of(store) == expected["past"]


def test_a_later_writer_goes_on(golden: tuple[Path, dict[str, Any]]) -> None:
    """It keeps all, writes only what changed, rolls back to every commit, and collects."""
    path, expected = golden
    content = states()
    with Store(path, mode="w") as store:
        assert commits_of(store) == expected["commits"]
        head = expected["loads"][expected["commits"][0]["id"]]
        store.save({**content[head], "new": torch.arange(9)}, step=100)
        assert_alike(store.load(), {**content[head], "new": torch.arange(9)})
        for commit, name in expected["loads"].items():
            store.rollback(commit)
            assert_alike(store.load(), content[name])
        store.collect(keep=1)
    with tierload.open(path) as store:
        assert store.verify(full=True).ok
        assert {name: commit.id for name, commit in store.tags().items()} == expected["tags"]


def test_the_rescue_reader_agrees(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    content = states()
    for commit, name in expected["loads"].items():
        found = rescue.read(path, commit=commit)
        for key in ("weight", "noise"):
            dtype, shape, data = found[key]
            wanted = content[name][key]
            assert tuple(shape) == tuple(wanted.shape)
            assert np.dtype(dtype) == wanted.numpy().dtype
            assert bytes(data) == wanted.numpy().tobytes()


def test_nothing_is_written_by_reading(golden: tuple[Path, dict[str, Any]]) -> None:
    path, _ = golden
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with tierload.open(path) as store:
        store.verify(full=True)
        store.load()
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
