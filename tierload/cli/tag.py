"""``tierload tag``: names of commits."""

from __future__ import annotations

from typing import Annotated

import typer

from tierload.cli.arguments import AsJson, OptionalWhich, StorePath
from tierload.cli.opening import reading, writing
from tierload.cli.output import print_json, print_table, say
from tierload.cli.text import clean, name, short, step, when
from tierload.cli.which import find
from tierload.types import Commit

__all__ = ["tag"]


def tag(
    path: StorePath,
    label: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The tag; without it, tags are listed.", show_default=False)
    ] = None,
    which: OptionalWhich = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag.")] = False,
    as_json: AsJson = False,
) -> None:
    """Names a commit, or lists the names.

    A name that is taken moves to the new commit. Tagged commits are never dropped by gc.
    """
    if remove and (label is None or which is not None):
        raise typer.BadParameter("--remove needs the name of a tag, and nothing else")
    if label is None:
        with reading(path) as store:
            _list(path, store.tags(), as_json)
        return
    with writing(path) as store:
        before = store.tags().get(label)
        commit = None if remove else find(store, which)
        store.tag(label, commit, remove=remove)
    if as_json:
        ids = [None if each is None else each.id for each in (before, commit)]
        print_json({"store": path, "tag": label, "before": ids[0], "commit": ids[1]})
        return
    was = f"; it was {name(before)}" if before and (commit is None or before.id != commit.id) else ""
    say(f"{clean(label)}: {name(commit) if commit else 'removed'}{was}")


def _list(path: str, tags: dict[str, Commit], as_json: bool) -> None:
    if as_json:
        print_json({"store": path, "tags": {label: commit.id for label, commit in tags.items()}})
    elif tags:
        print_table(
            ("tag", "commit", "step", "time"),
            [(clean(label), short(each), step(each), when(each.time)) for label, each in tags.items()],
            right=("step",),
            fold=("tag",),
        )
    else:
        say("no tags")
