"""What the rescue reader and the engine say of the same torn and damaged stores."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.rescue.keeper import Keeper
from tierload import _native, rescue
from tierload.rescue.catalog import open_catalog

Found = tuple[list[str], dict[str, int], dict[str, object]]  # ids of the commits, tags, recorded values


@pytest.mark.parametrize("lost", ["man", "seg"])
def test_both_pass_over_the_same_damaged_heads(tmp_path: Path, lost: str) -> None:
    keeper = Keeper(tmp_path / "store")
    reports = [keeper.save({"x": torch.full((20_000,), step)}, step=step) for step in range(5)]
    keeper.roll_back(1)
    reports += [keeper.save({"x": torch.full((20_000,), step)}, step=step) for step in (7, 8)]
    keeper.store.close()
    names = [f"{report.commit.txid:012x}" for report in reports[-2:]]
    for name in names:
        for file in (keeper.path / lost).glob(f"*-{name}*"):
            file.unlink()
    report = rescue.Report()
    found = rescue.read(keeper.path, report=report)
    assert found == keeper.expected[reports[1].commit.id]
    for name, line in zip(names[::-1], report.problems, strict=True):
        assert line.startswith(f"commit {int(name, 16)} ")
    with pytest.warns(UserWarning, match="newer ones are damaged"), tierload.Store(keeper.path) as store:
        loaded: Any = store.load()
    assert torch.equal(loaded["x"], torch.full((20_000,), 1))


def test_nothing_is_lost_to_a_torn_tail(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "store")
    keeper.save({"x": torch.ones(9)})
    keeper.store.record("a", 1)
    keeper.save({"x": torch.zeros(9)})
    keeper.store.close()
    journal = max((keeper.path / "wal").glob("c-*"))
    for path in (journal, journal.with_name("m" + journal.name[1:])):
        data = path.read_bytes()
        end = len(data.rstrip(b"\0"))
        path.write_bytes(data[: end - 3] + bytes(len(data) - end + 3))
    ids = [commit.id for commit in tierload.open(keeper.path).commits()]
    assert [commit.id for commit in rescue.commits(keeper.path)][::-1] == ids
    assert len(ids) == 1
    assert np.frombuffer(rescue.read(keeper.path)["x"][2], np.float32).all()


def by_rescue(path: Path) -> tuple[Found | str, bool]:
    report = rescue.Report()
    try:
        catalog = open_catalog(path, report)
    except (rescue.Damage, rescue.Refused) as error:
        return type(error).__name__, True
    values = {key: json.loads(value)["root"]["d"]["value"] for key, value in catalog.values.items()}
    ids = [commit.id for _, commit in sorted(catalog.commits.items())]
    return (ids, dict(catalog.tags), values), bool(report.problems)


def by_engine(path: Path) -> tuple[Found | str, bool]:
    try:
        with tierload.Store(path) as store:
            ids = [commit.id for commit in store.commits()][::-1]
            tags = {name: commit.txid for name, commit in store.tags().items()}
            return (ids, tags, store.recorded()), bool(store.damage)
    except tierload.StoreNotFound:
        return "Refused", True
    except tierload.CorruptStore:
        return "Damage", True


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of several small journals: of two writers, each of which rolled."""
    path = tmp_path_factory.mktemp("rolled") / "store"
    native = _native.Store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "Store", lambda **more: native(**more | {"journal_roll_bytes": 40_000}))
        for writer in range(2):
            with tierload.Store(path, mode="w") as store:
                for step in range(10 * writer, 10 * writer + 4):
                    store.save({"x": torch.full((3,), step)}, step=step, tags=[f"t{step % 10}"])
                    store.record(f"k{step % 2}", step)
                if writer:
                    store.rollback(11)
                    store.save({"x": torch.ones(2)}, step=99)
                    store.collect(keep=4)
    names = {file.name[2:] for file in (path / "wal").iterdir()}
    assert {"00000001-00000001", "00000002-00000001"} <= names
    return path


def spoil(path: Path, chance: random.Random) -> None:
    """A damage to SUPER or a journal, mostly the newest: of one copy, or of both at the same place."""
    journals = sorted((path / "wal").iterdir(), key=lambda file: file.name[2:])
    file = chance.choice([path / "SUPER", *journals, *journals[-2:] * 5])
    files = [file]
    if file.name != "SUPER" and chance.random() < 0.6:
        files.append(file.with_name("cm"[file.name[0] == "c"] + file.name[1:]))
    data = file.read_bytes() if file.exists() else b""
    at = chance.randrange(max(1, len(data.rstrip(b"\0"))))
    if chance.random() < 0.5:
        at = at - at % 4096 + chance.randrange(100)
    kind = chance.choice(["flip"] * 3 + ["cut", "zero", "gone"])
    for each in files:
        if not each.exists():
            continue
        bytes_of = bytearray(each.read_bytes())
        if kind == "gone":
            each.unlink()
        elif kind == "cut":
            each.write_bytes(bytes_of[:at])
        elif kind == "zero":
            each.write_bytes(bytes_of[: at - at % 4096] + bytes(4096) + bytes_of[at - at % 4096 + 4096 :])
        elif at < len(bytes_of):
            bytes_of[at] ^= 1 << chance.randrange(8)
            each.write_bytes(bytes_of)


@pytest.mark.parametrize("seed", range(4))
def test_both_read_the_same_from_damaged_journals(rolled: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    whole = by_rescue(rolled)
    assert whole == by_engine(rolled)
    seen = set[bool]()
    for number in range(30):
        path = tmp_path / f"{number}"
        shutil.copytree(rolled, path)
        for _ in range(chance.randint(1, 3)):
            spoil(path, chance)
        one, other = by_rescue(path), by_engine(path)
        assert one[0] == other[0]
        assert one[1] >= other[1]  # that SUPER is lost is a problem for the one and a warning for the other
        seen.add(one == whole)
        shutil.rmtree(path)
    assert seen == {True, False}
