"""``tierload verify``: is everything on disk what was written?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, StorePath
from tierload.cli.exits import DAMAGED
from tierload.cli.opening import open_to_read, stored_bytes
from tierload.cli.output import print_json, progress, say
from tierload.cli.text import clean, command, counted, name, short, size
from tierload.cli.which import find
from tierload.errors import CorruptStore
from tierload.types import Commit, Damage, VerifyReport

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["damage_json", "described", "is_whole", "verify", "verify_pages"]


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

    That is the journal, the metadata of all commits (both copies), and every byte of the head's pages, of one other
    commit's, or with --full of all commits'. Repairs nothing. Exits with 1 when anything is damaged, and says which commits are whole.
    """
    if full and which is not None:
        raise typer.BadParameter("--full reads all commits, --commit one: give one of them")
    with open_to_read(path, warnings=False) as store:
        commits = store.commits()
        read = commits if full else [find(store, which)] if commits or which else []
        report = verify_pages(store, None if full or not read else read[0], full=full)
        whole = [commit for commit in read if is_whole(store, commit, report)]
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
            "damages": [damage_json(damage) for damage in report.damages],
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
        return stored_bytes(store, commit) if commit else 0
    except CorruptStore:  # which the verification will say
        return 0


def is_whole(store: Store, commit: Commit, report: VerifyReport) -> bool:
    """Whether a commit whose pages were read can be loaded: its segments are good, and one copy of its manifest is."""
    if any(damage.path.startswith("seg/") for damage in report.damages if commit.id in damage.commits):
        return False
    try:
        store.keys(commit)
    except CorruptStore:
        return False
    return True


def damage_json(damage: Damage) -> dict[str, object]:
    """A damage for a document; what does not apply is null."""
    return {
        "message": damage.message,
        "commits": list(damage.commits),
        "steps": list(damage.steps),
        "key": damage.key or None,
        "page": None if damage.page < 0 else damage.page,
        "path": damage.path or None,
        "offset": None if damage.offset < 0 else damage.offset,
    }


def described(damage: Damage) -> str:
    """A damage on one line: what, and where. The engine's text names the commits of pages, not those of metadata."""
    pairs = zip(damage.commits, damage.steps, strict=True) if damage.page < 0 else ()
    named = ", ".join(f"{commit[:12]} (step {step})" for commit, step in pairs)
    return f"commit {named}: {clean(damage.message)}" if named else clean(damage.message)


def _print_report(report: VerifyReport, read: list[Commit]) -> None:
    whose = "of all commits" if report.full else f"of {name(read[0])}" if read else "of no commit"
    say(
        f"checked: the journal and the metadata of {counted(report.commits, 'commit')} (both copies), "
        f"{counted(report.pages, 'page')} {whose} ({size(report.bytes)}) in {report.seconds:.1f} s"
    )
    for damage in report.damages:
        say(f"DAMAGED {described(damage)}", "red")
    say("no damage" if report.ok else counted(len(report.damages), "damage"), "green" if report.ok else "bold red")


def _print_advice(
    path: str, read: list[Commit], whole: list[Commit], newest: Commit | None, full: bool, stopped: bool
) -> None:
    if len(whole) == len(read):
        say(f"whole: {', '.join(name(commit) for commit in whole)}" if not full else "every commit is whole")
    elif not full:
        say(f"only those pages were read; to learn which commits are whole: {command('verify', path, '--full')}")
        return
    else:
        broken = [name(commit) for commit in read if commit not in whole]
        say(f"damaged: {', '.join(broken)}")
        say(f"whole: {', '.join(name(commit) for commit in whole) or 'no commit'}")
    if newest and not newest.head and full and not stopped:
        line = command("rollback", path, "--to", f"commit:{short(newest)}")
        say(f"the newest whole commit is {name(newest)}; to go back to it: {line}", "bold")
