"""``tierload rollback``: make an earlier commit the head again, verified before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, DryRun, StorePath
from tierload.cli.diff import difference_json, print_values, values_json
from tierload.cli.exits import INTERRUPTED
from tierload.cli.opening import reading, recorded_at, writing
from tierload.cli.output import print_facts, print_json, say, warn
from tierload.cli.text import clean, command, commit_json, counted, name, short, size, when
from tierload.cli.verify import verify_pages
from tierload.cli.which import find
from tierload.errors import CorruptStore
from tierload.types import Commit, Difference, RollbackPlan, VerifyReport

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["rollback"]

_SHOWN = 8  # commits and keys that a plan lists; --json has all


@dataclass
class _Rollback:
    """A rollback on its way: what was asked, the plan, recorded values now and then, and what has come of it so far."""

    path: str
    dry_run: bool
    as_json: bool
    plan: RollbackPlan
    lsn: int  # whose state comes back
    now: Mapping[str, object]
    then: Mapping[str, object]
    report: VerifyReport | None = None
    done: Commit | None = None
    undo: str | None = None


def rollback(
    path: StorePath,
    to: Annotated[
        str | None, typer.Option(metavar="WHICH", help="To this step, tag or commit id.", show_default=False)
    ] = None,
    lsn: Annotated[
        int | None,
        typer.Option(min=1, max=2**63 - 1, metavar="N", help="To the state at this LSN.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="N commits back along the head's line.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Makes an earlier state the head again.

    Reads and checks every page of the target first, and refuses a damaged one; checks the result afterwards. Recorded
    values go back too. A rollback is a commit: what it leaves behind stays, and the last line says how to undo it.
    """
    if sum(value is not None for value in (to, lsn, steps)) != 1:
        raise typer.BadParameter("say where to: one of --to, --lsn and --steps")
    with reading(path) if dry_run else writing(path) as store:
        target = find(store, to) if to is not None else None
        plan = store.rollback(target, lsn=lsn, steps=steps, dry_run=True)
        at = plan.target.lsn if lsn is None else lsn
        it = _Rollback(path, dry_run, as_json, plan, at, store.recorded(), recorded_at(store, at) or {})
        if not as_json:
            _print_plan(it)
        if plan.target.id == plan.head.id and not plan.values:
            _finish(it, "nothing to change: the store is there already")
            return
        _verify_target(store, it)
        if dry_run:
            _finish(it, "dry run: nothing was changed")
            return
        if not yes and not _agreed(f"Roll back to {name(plan.target)}?"):
            warn("nothing was changed; --yes answers for you")
            raise typer.Exit(INTERRUPTED)
        it.undo = _undo(store, it)
        it.done = store.rollback(lsn=at).commit
        assert it.done is not None
        _check_result(it, it.done)
    _finish(it, f"done: the head is now {name(it.done)}; it was read back and equals the target")


def _agreed(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C, or nobody there to answer
        return False


def _verify_target(store: Store, it: _Rollback) -> None:
    """Reads the target.

    Raises:
        CorruptStore: It is damaged.
    """
    target = it.plan.target
    it.report = verify_pages(store, target)
    if target.id in it.report.whole:
        return
    for damage in it.report.damages:
        if target.id in damage.commits:
            warn(clean(damage.message))
    raise CorruptStore(
        f"{name(target)} is damaged, so nothing was changed; to learn which commits are whole: "
        f"{command('verify', it.path, '--full')}"
    )


def _check_result(it: _Rollback, done: Commit) -> None:
    """Opens the store as another process would: the new head must be the state that was asked for.

    Raises:
        CorruptStore: It is not.
    """
    from tierload.engine import Store

    with Store(it.path, mode="r") as store:
        head = store.head()
        again = store.rollback(lsn=it.lsn, dry_run=True)
    left = again.difference
    same = left is not None and not (left.changed or left.added or left.removed or again.values)
    if head is None or head.id != done.id or not same:
        raise CorruptStore(
            f"after the rollback the head is not what was asked for: {name(done)} is not {name(it.plan.target)}. "
            f"Please report this, with the output of {command('log', it.path, '--records')}"
        )


def _undo(store: Store, it: _Rollback) -> str:
    """The command that brings back what there is now: by commit, or by LSN where values were recorded since it."""
    head = it.plan.head
    if recorded_at(store, head.lsn) == it.now:
        return command("rollback", it.path, "--to", f"commit:{short(head)}")
    return command("rollback", it.path, "--lsn", str(next(iter(store.history())).lsn))


def _finish(it: _Rollback, message: str) -> None:
    if it.as_json:
        print_json(_document(it))
        return
    if it.report is not None:
        say(f"verified: {counted(it.report.pages, 'page')} of {name(it.plan.target)}, {size(it.report.bytes)}")
        elsewhere = sum(it.plan.target.id not in damage.commits for damage in it.report.damages)
        if elsewhere:
            warn(f"{counted(elsewhere, 'damage')} elsewhere in the store: {command('verify', it.path, '--full')}")
    say(message, "green" if it.done else "")
    if it.undo:
        say(f"to undo: {it.undo}")


def _document(it: _Rollback) -> dict[str, object]:
    plan = it.plan
    return {
        "store": it.path,
        "dry_run": it.dry_run,
        "done": it.done is not None,
        "head": commit_json(plan.head),
        "target": commit_json(plan.target),
        "left_behind": [commit_json(commit) for commit in plan.superseded],
        **difference_json(plan.difference),
        "values": values_json(plan.values, it.now, it.then),
        "verified_pages": it.report.pages if it.report else 0,
        "verified_bytes": it.report.bytes if it.report else 0,
        "commit": commit_json(it.done) if it.done else None,
        "undo": it.undo,
    }


def _print_plan(it: _Rollback) -> None:
    plan = it.plan
    facts = [
        ("from", f"{name(plan.head)} of {when(plan.head.time)}, the head"),
        ("to", f"{name(plan.target)} of {when(plan.target.time)}"),
        ("left behind", _some([name(commit) for commit in plan.superseded]) or "no commit"),
        ("changes", _changes(plan.difference)),
    ]
    if plan.difference is not None:
        keys = [*plan.difference.changed, *plan.difference.added, *plan.difference.removed]
        facts += [("keys", clean(_some(keys)))] if keys else []
    print_facts(facts)
    print_values(plan.values, it.now, it.then)
    say()


def _changes(difference: Difference | None) -> str:
    if difference is None:
        return "not known: the head is damaged"
    changed, added, removed = (len(keys) for keys in (difference.changed, difference.added, difference.removed))
    total = changed + removed + difference.unchanged  # keys of the head
    return (
        f"{changed:,} of {counted(total, 'key')}, {added:,} added, {removed:,} removed: "
        f"{size(difference.changed_bytes)}"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
