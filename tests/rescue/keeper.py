"""A store that is being written, and what every commit of it has to hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tierload
from tests.rescue.opinion import check_layout, check_store, expected_tensors
from tierload import Settings, rescue
from tierload.rescue.catalog import open_catalog
from tierload.rescue.manifest import Tensor


class Keeper:
    """A store, and what every commit of it has to hold."""

    def __init__(self, path: Path, settings: Settings | None = None) -> None:
        self.path, self.settings = path, settings or Settings()
        self.expected: dict[str, dict[str, Tensor]] = {}
        self.open()

    def open(self) -> None:
        self.store = tierload.open(self.path, mode="w", settings=self.settings)

    def save(self, state: object, **more: Any) -> tierload.SaveReport:
        report = self.store.save(state, **more)
        self.expected[report.commit.id] = expected_tensors(state)
        return report

    def roll_back(self, to: Any) -> tierload.Commit:
        plan = self.store.rollback(to)
        assert plan.commit is not None
        self.expected[plan.commit.id] = self.expected[plan.target.id]
        return plan.commit

    def check(self) -> None:
        """What rescue and the engine say of the catalog, and every commit's tensors."""
        found = check_store(self.path, self.expected)
        said = sorted(self.store.commits(), key=lambda commit: commit.txid)
        ids = {commit.txid: commit.id for commit in found} | {0: None}
        assert [(c.id, c.txid, c.lsn, c.step, c.raw_bytes, tuple(sorted(c.tags))) for c in found] == [
            (c.id, c.txid, c.lsn, c.step, c.raw_bytes, c.tags) for c in said
        ]
        assert [(ids.get(c.parent), ids.get(c.source)) for c in found] == [(c.parent, c.source) for c in said]
        assert [c.time / 1e9 for c in found] == [c.time for c in said]
        for one, other in zip(found, said, strict=True):
            meta = json.loads(one.meta)
            assert meta.get("note", "") == other.note
            assert meta["metrics"].keys() == {"d"}
            assert meta["metrics"]["d"] == other.metrics
        catalog = open_catalog(self.path, rescue.Report())
        line = [commit.id for commit in catalog.line()]
        assert set(line) == {c.id for c in said if not c.superseded}
        head = self.store.head()
        assert line[:1] == ([head.id] if head else [])
        documents = {key: json.loads(value) for key, value in catalog.values.items()}
        assert all(document.keys() == {"version", "root"} for document in documents.values())
        assert {key: document["root"]["d"]["value"] for key, document in documents.items()} == self.store.recorded()
        check_layout(self.path)
        assert self.store.verify(full=True).ok
