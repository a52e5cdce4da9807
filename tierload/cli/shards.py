"""``tierload show --shards``: what each rank has written of a commit, and how evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tierload.cli.output import print_json, print_table, say
from tierload.cli.text import commit_json, counted, name, size
from tierload.types import Balance, Commit, ShardInfo

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["show_shards"]


def show_shards(path: str, store: Store, commit: Commit, as_json: bool) -> None:
    """Prints the shards of a commit."""
    shards, plan = store.shards(commit), store.balance(commit)
    by_txid = {each.txid: each for each in store.commits()}
    if as_json:
        document = {
            "store": path,
            "commit": commit_json(commit),
            "shards": [asdict(one) | {"commit": _id(by_txid.get(one.txid))} for one in shards],
            "heaviest_to_mean": _spread(shards),
            "plan": None if plan is None else asdict(plan),
        }
        print_json(document)
        return
    print_table(
        ("rank", "size", "stored", "pages", "chunks", "own", "txid", "last changed by"),
        [
            (
                f"{one.rank}",
                size(one.raw_bytes),
                size(one.stored_bytes),
                f"{one.pages:,}",
                f"{one.chunks:,}",
                f"{one.own_values:,}",
                f"{one.txid}",
                name(by_txid[one.txid]) if one.txid in by_txid else "a commit that was dropped since",
            )
            for one in shards
        ],
        right=("rank", "size", "stored", "pages", "chunks", "own", "txid"),
    )
    heaviest = max(shards, key=lambda one: one.raw_bytes)
    say(
        f"{counted(len(shards), 'rank')}, {size(sum(one.raw_bytes for one in shards))}; the heaviest is rank "
        f"{heaviest.rank}, {_spread(shards):.2f} times the mean",
        "dim",
    )
    if plan is not None:
        say(_planned(plan), "dim")


def _id(commit: Commit | None) -> str | None:
    return commit.id if commit else None


def _spread(shards: Sequence[ShardInfo]) -> float:
    """The bytes of the heaviest rank over the mean of all; 1 where there are none."""
    total = sum(one.raw_bytes for one in shards)
    return max(one.raw_bytes for one in shards) * len(shards) / total if total else 1.0


def _planned(plan: Balance) -> str:
    saved = f", {plan.cuts_saved:,} less than equal runs of bytes need" if plan.cuts_saved else ""
    return (
        f"planned for values that ranks have in common: the heaviest {plan.load:.2f} times the mean, with "
        f"{counted(plan.cuts, 'cut')} inside tensors{saved}"
    )
