"""Makes a golden store: `python tests/golden/make.py tests/golden/format-N`. Done once for each released format.

The store has several sessions, a rollback, tags, recorded values, superseded and collected commits, pages of every
codec, and half of a packed page punched out. What a user put into it is described in `expected.json`, beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.golden.states import describe, digest, states
from tests.store.ondisk import journal_end, sectors_up
from tierload import Settings, Store


def settings(compression: Any) -> Settings:
    return Settings(compression=compression, page_bytes=8192, pack_below_bytes=2048, threads=1)


def commits_of(store: Store) -> list[dict[str, Any]]:
    """Everything that is known of each commit, newest first."""
    return [
        {
            "id": commit.id,
            "txid": commit.txid,
            "lsn": commit.lsn,
            "step": commit.step,
            "parent": commit.parent,
            "source": commit.source,
            "time": commit.time,
            "raw_bytes": commit.raw_bytes,
            "written_bytes": commit.written_bytes,
            "superseded": commit.superseded,
            "head": commit.head,
            "tags": list(commit.tags),
            "metrics": describe(dict(commit.metrics)),
            "note": commit.note,
        }
        for commit in store.commits()
    ]


def history_of(store: Store) -> list[Any]:
    return [
        [c.lsn, c.kind, c.time, c.key, describe(c.before), describe(c.after), c.step, c.commit] for c in store.history()
    ]


def past_of(store: Store) -> dict[str, str]:
    """The digest of the catalog as it was at every LSN that is kept."""
    lsns = [change.lsn for change in store.history()]
    return {str(lsn): digest(store._native.state_at(lsn).encode()) for lsn in lsns}


def seal(path: Path, expected: dict[str, Any]) -> None:
    """Ends the making of a golden store: what is expected of it goes beside it."""
    for journal in (path / "store" / "wal").iterdir():  # 60 KiB of zero fill would teach nothing
        os.truncate(journal, min(journal.stat().st_size, sectors_up(journal_end(journal.read_bytes()))))
    (path / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n", encoding="ascii")


def make_once(make: Callable[[Path], None]) -> None:
    """Makes a golden store where the command line says, unless there is something."""
    target = Path(sys.argv[1])
    if target.exists():
        sys.exit(f"{target} exists: a golden store is never written again")
    target.mkdir(parents=True)
    make(target)


def copied(name: str, to: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of a golden store, and what is expected of it."""
    folder = Path(__file__).parent / name
    store = Path(shutil.copytree(folder / "store", to / "store"))
    return store, json.loads((folder / "expected.json").read_text(encoding="ascii"))


def make(path: Path) -> None:
    """Writes the store and what is expected of it."""
    content = states()
    loads: dict[str, str] = {}

    def save(store: Store, name: str, **more: Any) -> str:
        commit = store.save(content[name], **more).commit.id
        loads[commit] = name
        return commit

    with Store(path / "store", mode="w", settings=settings("fast")) as store:
        save(store, "first", step=1, metrics={"loss": 2.5, "tokens": 2**40}, tags=("first", "a/b é"), note="née\n")
        store.record("lr", 0.5, step=1, sync=False)
        store.record("loader/position", {"epoch": 1, "index": [3, 4]}, sync=False)
        store.settings = settings("small")
        second = save(store, "second", step=2, metrics={"loss": float("nan")})
        store.record("lr", 0.25, step=2, sync=False)
        save(store, "spike", step=3, tags=("spike",))
        store.record("gone", 1, sync=False)
        plan = store.rollback(second)
        assert plan.commit is not None
        loads[plan.commit.id] = "second"
    with Store(path / "store", mode="w", settings=settings("off")) as store:
        save(store, "resumed", step=4)
        store.record("lr", 0.125, step=4, sync=False)
        store.tag("a/b é", remove=True)
        store.collect(keep=2)
        commits, history, past = commits_of(store), history_of(store), past_of(store)
        values, tags = describe(store.recorded()), {name: commit.id for name, commit in store.tags().items()}
    expected = {
        "states": {name: describe(state) for name, state in content.items()},
        "loads": {commit["id"]: loads[commit["id"]] for commit in commits},
        "commits": commits,
        "tags": tags,
        "values": values,
        "history": history,
        "past": past,
    }
    seal(path, expected)


if __name__ == "__main__":
    make_once(make)
