"""``tierload show``: one commit and what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierload.cli.arguments import AsJson, OptionalWhich, StorePath
from tierload.cli.opening import dtype_name, reading, recorded_at
from tierload.cli.output import print_facts, print_json, print_table, say
from tierload.cli.text import clean, commit_json, counted, name, pairs, shown, size, to_json, when
from tierload.cli.which import find
from tierload.types import ChunkInfo, Commit

__all__ = ["show"]


def show(path: StorePath, which: OptionalWhich = None, as_json: AsJson = False) -> None:
    """Shows one commit and what it holds: metrics, recorded values, keys and sizes."""
    with reading(path) as store:
        commit = find(store, which)
        keys = store.keys(commit)
        recorded = recorded_at(store, commit.lsn)
        stored = store.stored_bytes(commit)
        if as_json:
            document = {
                "store": path,
                "commit": commit_json(commit) | {"stored_bytes": stored},
                "recorded": to_json(recorded),
                "keys": [
                    {"key": info.key, "dtype": dtype_name(info), "shape": list(info.shape), "bytes": info.nbytes}
                    for info in keys
                ],
            }
            print_json(document)
            return
        print_facts(_facts(commit, {each.id: each for each in store.commits()}, stored))
        _print_recorded(recorded)
        _print_keys(keys)


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


def _print_keys(keys: Sequence[ChunkInfo]) -> None:
    say()
    if not keys:
        say("no tensors")
        return
    print_table(
        ("key", "dtype", "shape", "size"),
        [(clean(info.key), dtype_name(info), str(list(info.shape)), size(info.nbytes)) for info in keys],
        right=("size",),
        fold=("key",),
    )
    say(counted(len(keys), "tensor"), "dim")
