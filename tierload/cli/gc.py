"""``tierload gc``: drop old commits and free what nothing references."""

from __future__ import annotations

from typing import Annotated

import typer

from tierload.cli.arguments import AsJson, DryRun, StorePath
from tierload.cli.opening import reading, writing
from tierload.cli.output import print_json, print_table, say
from tierload.cli.text import commit_json, counted, pairs, short, size, step, when
from tierload.types import CollectReport

__all__ = ["gc"]


def gc(
    path: StorePath,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the newest N of the head's line.", show_default=False)
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Keep also steps that are multiples of K.", show_default=False),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(metavar="METRIC:min|max", help="Keep also the best one by a metric.", show_default=False),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Drops old commits and frees what nothing references any more.

    The head, tagged commits, the newest commit whose metrics are all finite, and data that a reader is using stay;
    commits that a rollback left behind go, unless they are tagged. Without --keep no commit is dropped: only remains of
    interrupted saves are removed.
    """
    for option, value in (("--keep-every", keep_every), ("--keep-best", keep_best)):
        if value is not None and keep is None:
            raise typer.BadParameter(f"{option} needs --keep: how many of the newest commits to keep besides")
    with reading(path) if dry_run else writing(path) as store:
        report = store.collect(keep=keep, keep_every=keep_every, keep_best=keep_best, dry_run=dry_run)
        if as_json:
            document = {
                "store": path,
                "dry_run": dry_run,
                "dropped": [commit_json(commit) for commit in report.dropped],
                "removed_files": None if dry_run else report.removed_files,
                "freed_bytes": None if dry_run else report.freed_bytes,
                "pinned": None if dry_run else report.pinned,
            }
            print_json(document)
        else:
            _print(report, dry_run)


def _print(report: CollectReport, dry_run: bool) -> None:
    if report.dropped:
        print_table(
            ("commit", "step", "time", "metrics", "size"),
            [
                (short(each), step(each), when(each.time), pairs(each.metrics), size(each.raw_bytes))
                for each in report.dropped
            ],
            right=("step", "size"),
            fold=("metrics",),
        )
        say()
    dropped = counted(len(report.dropped), "commit")
    if dry_run:
        say(f"would drop {dropped}; nothing was changed")
        return
    say(f"dropped {dropped}, removed {counted(report.removed_files, 'file')}, freed {size(report.freed_bytes)}")
    if report.pinned:
        say(f"{counted(report.pinned, 'manifest')} held by readers; a later gc frees their data")
