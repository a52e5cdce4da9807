"""What a person does with a store in a training script and after it, in the words of the README."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, state_of, stored_keys
from tests.state.alike import assert_alike
from tierload import KeyMismatch

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_runs(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first block of Python, as it stands there."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    monkeypatch.chdir(ram)
    names: dict[str, Any] = {}
    exec(compile(found[1], "README.md", "exec"), names)
    with tierload.open("runs/demo") as store:
        newest, *older = store.commits()
        assert newest.source
        assert newest.step == 100
        assert [commit.step for commit in older] == [200, 100, 0]
        assert math.isfinite(float(older[0].metrics["loss"]))  # type: ignore[arg-type]
        assert store.verify(full=True).ok
    model = nn.Linear(512, 512)
    tierload.load("runs/demo", into={"model": model}, keys="model")
    assert not torch.equal(model.weight, names["model"].weight), "that of step 100, not of step 200"
    tierload.load("runs/demo", into={"model": model}, keys="model", commit=older[0].id)
    assert torch.equal(model.weight, tierload.load("runs/demo", commit=older[0])["model"]["weight"])
    let_go(ram)


def trained(steps: int = 2) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": steps, "rng": tierload.RNG()}


def test_save_and_resume(store: Path) -> None:
    state = trained()
    report = tierload.save(state, store, step=2)
    assert report.path == str(store)
    assert report.commit.step == 2
    assert report.seconds > 0
    assert report.raw_bytes == report.commit.raw_bytes > 0
    assert report.pages >= report.written_pages > 0
    let_go(store)
    other = trained(0)
    filled = tierload.load(store, into=other)
    assert isinstance(filled, tierload.LoadReport)
    assert [filled.missing, filled.unexpected, filled.shapes, filled.dtypes, filled.cast] == [()] * 5
    assert "model/0.weight" in filled.loaded
    for name in ("model", "optimizer", "scheduler"):
        assert_alike(other[name].state_dict(), state[name].state_dict())
    assert other["epoch"] == 2


def test_strict_cast_and_keys(store: Path) -> None:
    tierload.save({"a": {"w": torch.ones(3), "v": torch.zeros(2)}, "b": {"w": torch.full((3,), 2.0)}, "n": 1}, store)
    assert_alike(tierload.load(store, keys="a"), {"a": {"w": torch.ones(3), "v": torch.zeros(2)}})
    assert_alike(tierload.load(store, keys="*/w"), {"a": {"w": torch.ones(3)}, "b": {"w": torch.full((3,), 2.0)}})
    assert_alike(tierload.load(store, keys=["n", "b/?"]), {"b": {"w": torch.full((3,), 2.0)}, "n": 1})
    target = {"a": {"w": torch.zeros(3, dtype=torch.bfloat16), "v": torch.ones(2), "new": torch.ones(1)}}
    with pytest.raises(KeyMismatch) as found:
        tierload.load(store, into=target)
    assert (found.value.missing, found.value.dtypes) == (("a/new",), ("a/w",))
    assert found.value.unexpected == ("b/w", "n")
    report = tierload.load(store, into=target, strict=False, cast=True)
    assert (report.loaded, report.cast) == (("a/v", "a/w"), ("a/w",))
    assert_alike(target["a"], {"w": torch.ones(3, dtype=torch.bfloat16), "v": torch.zeros(2), "new": torch.ones(1)})
    only = {"w": torch.zeros(3)}
    tierload.load(store, into={"b": only}, keys="b")
    assert only["w"].tolist() == [2.0] * 3


def test_rolling_back_and_going_on(store: Path) -> None:
    for step in (1, 2, 3):
        tierload.save(state_of(step), store, step=step)
    plan = tierload.rollback(store, 1)
    assert [commit.step for commit in plan.superseded] == [3, 2]
    assert_is(tierload.load(store), 1)
    four = tierload.save(state_of(4), store, step=4).commit
    with tierload.open(store) as opened:
        assert opened.head() == four
        line = [commit.step for commit in opened.commits() if not commit.superseded]
        assert line == [4, 1, 1], "the rollback to 1 is a commit itself"
    assert tierload.rollback(store, steps=1).target.step == 1
    assert_is(tierload.load(store), 1)


def test_tags(store: Path) -> None:
    tierload.save(state_of(1), store, step=1, tags=["first", "best"])
    tierload.save(state_of(2), store, step=2)
    with tierload.open(store, mode="w") as opened:
        opened.tag("newest")
        opened.tag("best", 2)
        opened.tag("名前 with spaces/and slashes", 1)
        assert {name: commit.step for name, commit in opened.tags().items()} == {
            "best": 2,
            "first": 1,
            "newest": 2,
            "名前 with spaces/and slashes": 1,
        }
        opened.tag("newest", remove=True)
        assert opened.find(tag="first").tags == ("first", "名前 with spaces/and slashes")
        opened.collect(keep=1)
        assert_is(opened.load(tag="first"), 1)
    let_go(store)
    assert_is(tierload.load(store, tag="first"), 1)
    assert_is(tierload.load(store, tag="best"), 2)
    assert "newest" not in tierload.open(store).tags()


def test_metrics_and_notes(store: Path) -> None:
    metrics = {
        "loss": math.nan,
        "norm": math.inf,
        "lr": np.float32(0.1),
        "name": "né",
        "by layer": {"a": [1, 2.5], "b": None},
        "big": 2**80,
    }
    tierload.save(state_of(1), store, step=1, metrics=metrics, note="a spike\nhere é")
    tierload.save(state_of(2), store)
    let_go(store)
    newest, first = tierload.open(store).commits()
    assert_alike(dict(first.metrics), metrics)
    assert first.note == "a spike\nhere é"
    assert (dict(newest.metrics), newest.note, newest.step) == ({}, "", None)
    with pytest.raises(ValueError, match=r"loss.*\.item\(\)"):
        tierload.save(state_of(3), store, metrics={"loss": torch.tensor(1.0)})
    with pytest.raises(tierload.UnsupportedValue, match="f"):
        tierload.save(state_of(3), store, metrics={"f": print})
    assert len(tierload.open(store).commits()) == 2


def test_recorded_values(store: Path) -> None:
    tierload.save(state_of(1), store, step=1)
    with tierload.open(store, mode="w") as opened:
        lsns = [opened.record("loss", value, step=n) for n, value in enumerate((2.5, math.nan, 1.5))]
        lsns.append(opened.record("loader", {"shard": 3, "seen": [1, 2], "name": "a"}))
        opened.record("é/x", None, sync=False)
        assert lsns == sorted(set(lsns))
        assert_alike(opened.recorded(), {"loader": {"shard": 3, "seen": [1, 2], "name": "a"}, "loss": 1.5, "é/x": None})
        with pytest.raises(ValueError, match=r"record.*tensor"):
            opened.record("w", torch.ones(2))
        opened.save(state_of(2), step=2)
        opened.record("loss", 0.5, step=9)
        newest, older = [change for change in opened.history() if change.key == "loss"][:2]
        assert (newest.before, newest.after, newest.step) == (1.5, 0.5, 9)
        assert (older.after, older.step) == (1.5, 2)
        assert math.isnan(older.before)  # type: ignore[arg-type]
        assert [change.lsn for change in opened.history()] == sorted((c.lsn for c in opened.history()), reverse=True)
    let_go(store)
    tierload.rollback(store, lsn=lsns[0])
    with tierload.open(store) as opened:
        assert opened.recorded() == {"loss": 2.5}
        assert_is(opened.load(), 1)
        assert {change.kind for change in opened.history()} >= {"commit", "rollback", "change", "snapshot"}


def test_diff(store: Path) -> None:
    state = {"same": torch.arange(5000), "changed": torch.zeros(5000), "gone": torch.ones(10), "small": torch.ones(2)}
    first = tierload.save(state, store, step=1, tags=["a"], settings=SMALL).commit
    del state["gone"]
    changed = state["changed"].clone()
    changed[4999] = 1.0
    tierload.open(store, mode="w").record("lr", 0.1)
    second = tierload.save(state | {"changed": changed, "new": torch.ones(7)}, store, step=2).commit
    with tierload.open(store) as opened:
        for a, b in ((1, 2), ("a", second.id), (first, second), (first.id[:10], 2)):
            found = opened.diff(a, b)
            assert (found.added, found.removed, found.changed) == (("new",), ("gone",), ("changed",))
            assert found.unchanged == 2
            assert 28 < found.changed_bytes <= 28 + 20_000
            assert found.values == ("lr",)
        back = opened.diff(2, 1)
        assert (back.added, back.removed) == (("gone",), ("new",))
        nothing = opened.diff(1, first)
        assert (nothing.added, nothing.removed, nothing.changed, nothing.changed_bytes) == ((), (), (), 0)


def test_verify_and_collect(store: Path) -> None:
    for step in range(1, 13):
        tierload.save(state_of(step), store, step=step, settings=SMALL)
    with tierload.open(store, mode="w") as opened:
        read: list[int] = []
        report = opened.verify(full=True, progress=read.append)
        assert report.ok
        assert report.full
        assert report.commits == 12
        assert report.pages > 12
        assert sum(read) == report.bytes > 0
        assert opened.verify().bytes < report.bytes
        planned = opened.collect(keep=2, keep_every=5, dry_run=True)
        assert [commit.step for commit in planned.dropped] == [1, 2, 3, 4, 6, 7, 8, 9]
        assert len(opened.commits()) == 12
        done = opened.collect(keep=2, keep_every=5)
        assert done.dropped == planned.dropped
        assert done.freed_bytes > 0
        assert done.removed_files > 0
        assert [commit.step for commit in opened.commits()] == [12, 11, 10, 5]
        assert opened.collect(keep=2, keep_every=5).freed_bytes == 0
        for step in (5, 10, 11, 12):
            assert_is(opened.load(step=step), step)
        assert opened.verify(full=True).ok


def test_a_bare_module_and_a_bare_tensor(store: Path) -> None:
    model = nn.Linear(3, 2)
    tierload.save(model, store)
    other = nn.Linear(3, 2)
    tierload.load(store, into=other)
    assert_alike(other.state_dict(), model.state_dict())
    assert stored_keys(store) == ["bias", "weight"]
    tierload.save(torch.arange(3), store)
    assert tierload.load(store).tolist() == [0, 1, 2]
    target = torch.zeros(3, dtype=torch.int64)
    tierload.load(store, into=target)
    assert target.tolist() == [0, 1, 2]
    with pytest.raises(KeyMismatch):
        tierload.load(store, into=other)
