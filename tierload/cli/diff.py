"""``tierload diff``: what changed between two commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierload.cli.arguments import AsJson, StorePath, WhichA, WhichB
from tierload.cli.opening import reading, recorded_at
from tierload.cli.output import print_json, print_table, say
from tierload.cli.text import clean, commit_json, counted, name, shown, size, to_json
from tierload.cli.which import find
from tierload.types import Difference

__all__ = ["diff", "difference_json", "print_values", "values_json"]


def diff(path: StorePath, a: WhichA, b: WhichB, as_json: AsJson = False) -> None:
    """Shows what changed from one commit to another.

    Keys are compared by the digests of their pages. Data is read only where tensors are cut into other pieces, as by
    another number of ranks. A difference is no failure: the exit code is 0.
    """
    with reading(path) as store:
        old, new = find(store, a), find(store, b)
        difference = store.diff(old, new)
        before, after = (recorded_at(store, commit.lsn) or {} for commit in (old, new))
        if as_json:
            document = {
                "store": path,
                "a": commit_json(old),
                "b": commit_json(new),
                **difference_json(difference),
                "values": values_json(difference.values, before, after),
            }
            print_json(document)
            return
        say(f"from {name(old)} to {name(new)}")
        _print_keys(difference)
        print_values(difference.values, before, after)
        changed, added, removed = (len(keys) for keys in (difference.changed, difference.added, difference.removed))
        say(
            f"\n{changed:,} changed, {added:,} added, {removed:,} removed ({size(difference.changed_bytes)}); "
            f"{difference.unchanged:,} unchanged; {counted(len(difference.values), 'recorded value')} changed"
        )


def _print_keys(difference: Difference) -> None:
    kinds = (("changed", difference.changed), ("added", difference.added), ("removed", difference.removed))
    rows = [(kind, clean(key)) for kind, keys in kinds for key in keys]
    if rows:
        say()
        print_table(("what", "key"), rows, fold=("key",))


def difference_json(difference: Difference | None) -> dict[str, object]:
    """The keys of a difference, for a document; all null when it is not known."""
    if difference is None:
        return dict.fromkeys(("changed", "added", "removed", "unchanged", "changed_bytes"))
    return {
        "changed": list(difference.changed),
        "added": list(difference.added),
        "removed": list(difference.removed),
        "unchanged": difference.unchanged,
        "changed_bytes": difference.changed_bytes,
    }


def values_json(
    keys: Sequence[str], before: Mapping[str, object], after: Mapping[str, object]
) -> list[dict[str, object]]:
    """Recorded values that differ, for a document; a side without the key has null."""
    return [{"key": key, "before": to_json(before.get(key)), "after": to_json(after.get(key))} for key in keys]


def print_values(keys: Sequence[str], before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Recorded values that differ, as a table."""
    if not keys:
        return
    say()
    print_table(
        ("recorded", "before", "after"),
        [(clean(key), *(shown(side[key]) if key in side else "-" for side in (before, after))) for key in keys],
        fold=("recorded", "before", "after"),
    )
