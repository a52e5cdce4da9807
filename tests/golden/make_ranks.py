"""Makes a golden store of two ranks: `python tests/golden/make_ranks.py tests/golden/ranks-N`. Done once a format.

Its ranks have tensors that are spread, copied, and cut among them, and values of their own; one commit changes nothing
but a value of rank 1, so rank 0's shard is that of the commit before; one is a rollback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.golden.make import commits_of, make_once, seal, settings
from tests.golden.states import describe
from tests.golden.states_ranks import NEW_OWN, RANKS, STEPS, state_of_rank
from tests.ranks.world import results
from tierload import Store


def save(rank: int, ranks: int, path: str) -> None:
    """What each rank does."""
    with Store(path, mode="w", settings=settings("fast")) as store:
        for step in STEPS:
            store.save(state_of_rank(rank, ranks, step), step=step, metrics={"loss": 1 / step}, tags=(f"step {step}",))


def vectors_of(store: Store) -> dict[str, list[int]]:
    """The version vector of each commit."""
    return {commit.id: [shard.txid for shard in store.shards(commit)] for commit in store.commits()}


def expect(store: Store) -> dict[str, Any]:
    """All that is known of the store."""
    commits = commits_of(store)
    loads = {c["id"]: [describe(store.load(commit=c["id"], rank=rank)) for rank in range(RANKS)] for c in commits}
    return {"commits": commits, "loads": loads, "vectors": vectors_of(store)}


def make(path: Path) -> None:
    """Writes the store and what is expected of it."""
    results(RANKS, save, str(path / "store"))
    with Store(path / "store", mode="w", settings=settings("off")) as store:
        store.rollback(NEW_OWN)
        expected = expect(store)
    seal(path, expected)


if __name__ == "__main__":
    make_once(make)
