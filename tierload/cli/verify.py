"""``tierload verify``: is everything on disk what was written?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, StorePath
from tierload.cli.exits import DAMAGED
from tierload.cli.output import print_json, progress, say
from tierload.cli.text import clean, command, counted, name, short, size
from tierload.cli.which import find
from tierload.errors import CorruptStore
from tierload.types import Commit, Damage, VerifyReport

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["verify", "verify_pages"]


def verify(
    path: StorePath,
    full: Annotated[bool, typer.Option("--full", help="Read the pages of all commits.")] = False,
    which: Annotated[
        str | None,
        typer.Option("--commit", metavar="WHICH", help="Read this commit's pages, not the head's.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Checks that what is on disk is what was written.

    That is the journal, the metadata of all commits (both copies, of every rank), and every byte of the head's pages,
    of one other commit's, or with --full of all commits'. Repairs nothing. Says which commits are whole when something
    is damaged.
    """
    if full and which is not None:
        raise typer.BadParameter("--full reads all commits, --commit one: give one of them")
    from tierload.engine import Store

    with Store(path, mode="r") as store:  # its warnings are damages of the report
        commits = store.commits()
        read = commits if full else [find(store, which)] if commits or which else []
        report = verify_pages(store, None if full or not read else read[0], full=full)
        read = [commit for commit in commits if commit.id in report.read]  # a live run may have dropped some since
        whole = [commit for commit in read if commit.id in report.whole]
        stopped = bool(store.damage)
    newest = next((commit for commit in whole if not commit.superseded), whole[0] if whole else None)
    if as_json:
        document = {
            "store": path,
            "ok": report.ok,
            "full": full,
            "commits": report.commits,
            "read": [commit.id for commit in read],
            "pages": report.pages,
            "bytes": report.bytes,
            "seconds": report.seconds,
            "damages": [_damage_json(damage) for damage in report.damages],
            "whole": [commit.id for commit in whole],
            "newest_whole": newest.id if newest else None,
        }
        print_json(document)
    else:
        _print_report(report, read)
        if not report.ok:
            _print_advice(path, read, whole, newest, full, stopped)
    if not report.ok:
        raise typer.Exit(DAMAGED)


def verify_pages(store: Store, commit: Commit | None, *, full: bool = False) -> VerifyReport:
    """Verifies the pages of a commit (the head), or of all, with a bar."""
    if full:
        total = sum(file.stat().st_size for file in Path(store.path, "seg").glob("*"))
    else:
        total = _bytes_to_read(store, commit)
    with progress("verifying", total) as add:
        return store.verify(full=full, commit=commit, progress=add)


def _bytes_to_read(store: Store, commit: Commit | None) -> int:
    try:
        return store.stored_bytes(commit) if commit else 0
    except CorruptStore:  # which the verification will say
        return 0


def _damage_json(damage: Damage) -> dict[str, object]:
    """A damage for a document; what does not apply is null."""
    return {
        "message": damage.message,
        "commits": list(damage.commits),
        "steps": list(damage.steps),
        "keys": list(damage.keys),
        "page": None if damage.page < 0 else damage.page,
        "rank": None if damage.rank < 0 else damage.rank,
        "path": damage.path or None,
        "offset": None if damage.offset < 0 else damage.offset,
    }


def _print_report(report: VerifyReport, read: list[Commit]) -> None:
    whose = "of all commits" if report.full else f"of {name(read[0])}" if read else "of no commit"
    say(
        f"checked: the journal and the metadata of {counted(report.commits, 'commit')} (both copies), "
        f"{counted(report.pages, 'page')} {whose} ({size(report.bytes)}) in {report.seconds:.1f} s"
    )
    for damage in report.damages:
        say(f"DAMAGED {clean(damage.message)}", "red")
    say("no damage" if report.ok else counted(len(report.damages), "damage"), "green" if report.ok else "bold red")


def _print_advice(
    path: str, read: list[Commit], whole: list[Commit], newest: Commit | None, full: bool, stopped: bool
) -> None:
    if stopped:
        say("the journal is damaged: commits after that are not shown, and the store opens for reading only")
    if not full and len(whole) < len(read):
        say(f"only these pages were read; to learn which commits are whole: {command('verify', path, '--full')}")
        return
    if len(whole) < len(read):
        say(f"damaged: {', '.join(name(commit) for commit in read if commit not in whole)}")
    say(f"whole: {', '.join(name(commit) for commit in whole) or 'no commit'}")
    if full and newest and not newest.head and not stopped:
        line = command("rollback", path, "--to", f"commit:{short(newest)}")
        say(f"the newest whole commit is {name(newest)}; to go back to it: {line}", "bold")
