"""``tierload log``: commits, or every record of the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated

import typer

from tierload.cli.arguments import AsJson, StorePath
from tierload.cli.opening import reading
from tierload.cli.output import print_json, print_table, say
from tierload.cli.text import clean, command, commit_json, counted, name, pairs, short, shown, size, step, to_json, when
from tierload.types import Change, Commit

__all__ = ["log"]


def log(
    path: StorePath,
    everything: Annotated[bool, typer.Option("--all", help="Also commits that a rollback left behind.")] = False,
    number: Annotated[
        int | None, typer.Option("-n", metavar="N", min=1, help="The newest N only.", show_default=False)
    ] = None,
    records: Annotated[bool, typer.Option("--records", help="Every record of the journal instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists commits, newest first.

    The head's line: commits that a rollback left behind are shown with --all.
    """
    with reading(path) as store:
        commits = store.commits()
        if records:
            changes = list(islice(store.history(), number))
            _print_records(path, changes, {commit.txid: commit for commit in commits}, as_json)
            return
        chosen = [commit for commit in commits if everything or not commit.superseded][:number]
        if as_json:
            head = next((commit.id for commit in commits if commit.head), None)
            print_json({"store": path, "head": head, "commits": [commit_json(commit) for commit in chosen]})
        elif commits:
            _print_commits(chosen, {commit.id: commit for commit in commits})
            hidden = 0 if everything else sum(commit.superseded for commit in commits)
            if hidden:
                say(f"{counted(hidden, 'commit')} left behind by a rollback: {command('log', path, '--all')}", "dim")
        else:
            say("no commit yet: nothing has been saved")


def _print_commits(chosen: Sequence[Commit], known: Mapping[str, Commit]) -> None:
    several = any(commit.ranks > 1 for commit in chosen)
    print_table(
        ("commit", "step", "time", *(["ranks"] if several else []), "metrics", "size", "written", "tags", "state"),
        [
            (
                short(commit),
                step(commit),
                when(commit.time),
                *([f"{commit.ranks:,}"] if several else []),
                pairs(commit.metrics),
                size(commit.raw_bytes),
                size(commit.written_bytes),
                clean(" ".join(commit.tags)),
                _state(commit, known),
            )
            for commit in chosen
        ],
        right=("step", "ranks", "size", "written"),
        fold=("metrics", "tags", "state"),
        dim=[commit.superseded for commit in chosen],
    )


def _state(commit: Commit, known: Mapping[str, Commit]) -> str:
    words = ["head"] if commit.head else ["superseded"] if commit.superseded else []
    if commit.source is not None:
        words.append(f"rollback to {short(known[commit.source])}")
    return ", ".join(words)


def _print_records(path: str, changes: Sequence[Change], commits: Mapping[int, Commit], as_json: bool) -> None:
    if as_json:
        print_json({"store": path, "records": [_record_json(change, commits) for change in changes]})
        return
    print_table(
        ("lsn", "time", "record", "what"),
        [(str(change.lsn), when(change.time), change.kind, _what(change, commits)) for change in changes],
        right=("lsn",),
        fold=("what",),
    )


def _what(change: Change, commits: Mapping[int, Commit]) -> str:
    at = "" if change.step is None else f" (step {change.step})"
    match change.kind:
        case "commit" | "rollback":
            return f"{str(change.commit)[:12]}{at}"
        case "change":
            return f"{clean(change.key)}: {shown(change.before)} -> {shown(change.after)}{at}"
        case "tag":
            return f"{clean(change.key)}: {_tagged(change.before, commits)} -> {_tagged(change.after, commits)}"
        case "collect":
            assert isinstance(change.before, list)
            return f"dropped {' '.join(str(dropped)[:12] for dropped in change.before)}"
    return ""


def _tagged(txid: object, commits: Mapping[int, Commit]) -> str:
    if not isinstance(txid, int) or txid == 0:
        return "nothing"
    return name(commits[txid]) if txid in commits else "a commit that was dropped since"


def _record_json(change: Change, commits: Mapping[int, Commit]) -> dict[str, object]:
    before, after = change.before, change.after
    if change.kind == "tag":
        ids = {txid: commit.id for txid, commit in commits.items()}
        before, after = (ids.get(txid) if isinstance(txid, int) else None for txid in (before, after))
    return {
        "lsn": change.lsn,
        "kind": change.kind,
        "time": change.time,
        "key": change.key,
        "before": to_json(before),
        "after": to_json(after),
        "step": change.step,
        "commit": change.commit,
    }
