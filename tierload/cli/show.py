"""``tierload show``: one commit and what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from tierload.cli.arguments import AsJson, OptionalWhich, StorePath
from tierload.cli.opening import dtype_name, reading, recorded_at
from tierload.cli.output import print_facts, print_json, print_table, say
from tierload.cli.shards import show_shards
from tierload.cli.text import clean, commit_json, counted, name, pairs, shown, size, to_json, when
from tierload.cli.which import find
from tierload.types import ChunkInfo, Commit

__all__ = ["show"]


def show(
    path: StorePath,
    which: OptionalWhich = None,
    shards: Annotated[bool, typer.Option("--shards", help="What each rank has written of it instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows one commit and what it holds: metrics, recorded values, keys and sizes."""
    with reading(path) as store:
        commit = find(store, which)
        if shards:
            show_shards(path, store, commit, as_json)
            return
        keys = store.keys(commit)
        recorded = recorded_at(store, commit.lsn)
        stored = store.stored_bytes(commit)
        if as_json:
            document = {
                "store": path,
                "commit": commit_json(commit) | {"stored_bytes": stored},
                "recorded": to_json(recorded),
                "keys": [_key_json(info) for info in keys],
            }
            print_json(document)
            return
        print_facts(_facts(commit, {each.id: each for each in store.commits()}, stored))
        _print_recorded(recorded)
        _print_keys(keys, commit.ranks)


def _facts(commit: Commit, known: Mapping[str, Commit], stored: int) -> list[tuple[str, str]]:
    state = "the head" if commit.head else "superseded: a rollback left it behind" if commit.superseded else ""
    facts = [
        ("commit", commit.id),
        ("state", state),
        ("step", "" if commit.step is None else str(commit.step)),
        ("time", when(commit.time)),
        ("parent", name(known[commit.parent]) if commit.parent else "none"),
        ("rollback to", name(known[commit.source]) if commit.source else ""),
        ("tags", clean(" ".join(commit.tags))),
        ("metrics", pairs(commit.metrics)),
        ("note", clean(commit.note)),
        ("lsn", str(commit.lsn)),
        ("size", f"{size(commit.raw_bytes)} ({commit.raw_bytes:,} bytes)"),
        ("stored", f"{size(stored)} in pages, shared ones included"),
        ("written", f"{size(commit.written_bytes)} of segments by this commit"),
        ("io", clean(commit.io)),
        ("ranks", f"{commit.ranks:,} wrote it together" if commit.ranks > 1 else ""),
    ]
    return [(label, value) for label, value in facts if value]


def _print_recorded(recorded: Mapping[str, object] | None) -> None:
    if recorded is None:
        say("\nrecorded values: the journal does not reach back to this commit")
    elif recorded:
        say()
        print_table(
            ("recorded", "value"),
            [(clean(key), shown(value)) for key, value in sorted(recorded.items())],
            fold=("recorded", "value"),
        )


def _key_json(info: ChunkInfo) -> dict[str, object]:
    return {
        "key": info.key,
        "dtype": dtype_name(info),
        "shape": list(info.shape),
        "bytes": info.nbytes,
        "rank": info.rank,
    }


def _print_keys(keys: Sequence[ChunkInfo], ranks: int) -> None:
    say()
    if not keys:
        say("no tensors")
        return
    rows = _rows(keys, ranks)
    own = any(row[-1] for row in rows)
    print_table(
        ("key", "dtype", "shape", "size", *(["own"] if own else [])),
        [row if own else row[:-1] for row in rows],
        right=("size",),
        fold=("key",),
    )
    several = f": {len(rows):,} keys" if len(rows) < len(keys) else ""
    say(counted(len(keys), "tensor") + several, "dim")


def _rows(keys: Sequence[ChunkInfo], ranks: int) -> list[tuple[str, ...]]:
    """A row a key; what each rank has of its own is one where all are alike, and else one a rank."""
    alike: dict[tuple[str, int, tuple[int, ...]], list[ChunkInfo]] = {}
    for info in keys:
        alike.setdefault((info.key, info.dtype, info.shape), []).append(info)
    rows: list[tuple[str, ...]] = []
    for same in alike.values():
        for info in same[:1] if len(same) == ranks else same:
            own = "" if info.rank is None else f"each of {ranks:,}" if len(same) == ranks > 1 else f"rank {info.rank}"
            nbytes = sum(one.nbytes for one in same) if len(same) == ranks else info.nbytes
            rows.append((clean(info.key), dtype_name(info), str(list(info.shape)), size(nbytes), own))
    return rows
