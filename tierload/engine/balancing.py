"""What each rank of a commit has written, and how that was dealt out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierload import _native
from tierload.engine.inventory import Root
from tierload.engine.loading import table_of
from tierload.engine.pieces import ALPHA, item_of, parts_of
from tierload.layout import ManifestTable
from tierload.plan import assign_writers, explain
from tierload.state import listed
from tierload.types import Balance, Commit, ShardInfo

__all__ = ["balance", "shards", "stored_bytes"]


def stored_bytes(commit: Commit, open_shard: Callable[[int], _native.Manifest]) -> int:
    """How many bytes the pages of a commit have on disk, those that several shards have counted once."""
    if commit.ranks == 1:
        return table_of(open_shard(0)).stored_bytes()
    places: dict[tuple[str, int], int] = {}
    for rank in range(commit.ranks):
        manifest = open_shard(rank)
        places.update(_places(manifest, table_of(manifest)))
    return sum(places.values())


def _places(manifest: _native.Manifest, table: ManifestTable) -> dict[tuple[str, int], int]:
    """Where the pages of a shard are, and the length of each."""
    pages = np.unique(table.pages[["segment", "offset", "stored_length"]])
    paths = {number: manifest.segment_path(number) for number in np.unique(pages["segment"]).tolist()}
    return {(paths[segment], offset): length for segment, offset, length in pages.tolist()}


def shards(native: _native.Store, commit: Commit, open_shard: Callable[[int], _native.Manifest]) -> list[ShardInfo]:
    """A line for each shard of a commit."""
    vector = Root(native, commit).vector
    found = []
    for rank in range(commit.ranks):
        manifest = open_shard(rank)
        table = table_of(manifest)
        found.append(
            ShardInfo(
                rank=rank,
                txid=int(vector[rank]),
                raw_bytes=int(table.rows["bytes"].sum()),
                stored_bytes=table.stored_bytes(),
                pages=len(table.pages),
                chunks=len(table.rows),
                own_values=listed(manifest.state.tobytes(), rank).own_values if commit.ranks > 1 else 0,
            )
        )
    return found


def balance(commit: Commit, manifest: _native.Manifest) -> Balance | None:
    """The plan of a commit by several ranks in numbers, made again from the shard of rank 0. None where there was
    nothing to plan, or it is not how this release plans."""
    if commit.ranks == 1:
        return None
    tensors = [one for one in listed(manifest.state.tobytes(), 0).tensors if one.owner < 0]
    tensors = [one for one in tensors if one.layout is None or None in one.layout.placements]
    tensors.sort(key=lambda one: one.key.encode("utf-8", "surrogatepass"))
    items = [item_of(one.key, one.nbytes, one.shape, one.layout) for one in tensors]
    planned = assign_writers(items, commit.ranks, None, manifest.page_bytes, ALPHA)
    large = any(item.nbytes >= manifest.page_bytes for item in items)  # the others are rank 0's
    if not large or [one.parts for one in tensors] != [parts_of(parts) for parts in planned]:
        return None
    plan = explain(items, commit.ranks, None, manifest.page_bytes, ALPHA)
    before, after = (round(cost.communication * len(items)) for cost in (plan.before, plan.after))
    return Balance(load=plan.after.load, cuts=after, cuts_saved=before - after)
