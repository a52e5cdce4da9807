"""``tierload rollback``: make an earlier commit the head again, verified before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, DryRun, StorePath
from tierload.cli.diff import difference_json, print_values, values_json
from tierload.cli.exits import INTERRUPTED
from tierload.cli.opening import open_to_read, open_to_write, recorded_at
from tierload.cli.output import print_facts, print_json, say, warn
from tierload.cli.text import clean, command, commit_json, counted, name, short, size, when
from tierload.cli.verify import damage_json, described, is_whole, verify_pages
from tierload.cli.which import find
from tierload.errors import CorruptStore
from tierload.types import Commit, Damage, RollbackPlan, VerifyReport

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["rollback"]

_SHOWN = 8  # commits and keys that a plan lists; --json has all


@dataclass(frozen=True)
class _Going:
    """A rollback that is under way: the plan, the LSN whose state comes back, and recorded values now and then."""

    path: str
    plan: RollbackPlan
    lsn: int
    now: Mapping[str, object]
    then: Mapping[str, object]

    @property
    def changes_nothing(self) -> bool:
        return self.plan.target == self.plan.head and not self.plan.values


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
    values go back too. A rollback is a commit: what it leaves behind stays in the store, and the last line says how to undo it.
    """
    if sum(value is not None for value in (to, lsn, steps)) != 1:
        raise typer.BadParameter("say where to: one of --to, --lsn and --steps")
    with open_to_read(path) if dry_run else open_to_write(path) as store:
        target = find(store, to) if to is not None else None
        plan = store.rollback(target, lsn=lsn, steps=steps, dry_run=True)
        at = plan.target.lsn if lsn is None else lsn
        going = _Going(path, plan, at, store.recorded(), recorded_at(store, at) or {})
        if not as_json:
            _print_plan(going)
        if going.changes_nothing:
            _finish(going, None, None, dry_run, as_json, "nothing to change: that is what the store has now")
            return
        report = _verified(store, going, dry_run, as_json)
        if dry_run:
            _finish(going, report, None, dry_run, as_json, "dry run: nothing was changed")
            return
        if not yes and not _agreed(name(plan.target)):
            warn("nothing was changed; --yes answers for you")
            raise typer.Exit(INTERRUPTED)
        undo = _undo(store, going)
        done = store.rollback(lsn=at).commit
        assert done is not None
        _check_result(going, done)
    message = f"done: the head is now {name(done)}; it was read back and equals the target"
    _finish(going, report, done, dry_run, as_json, message, undo)


def _agreed(target: str) -> bool:
    try:
        return typer.confirm(f"Roll back to {target}?", err=True)
    except typer.Abort:
        return False


def _verified(store: Store, going: _Going, dry_run: bool, as_json: bool) -> VerifyReport:
    """Reads the target.

    Raises:
        CorruptStore: It is damaged.
    """
    target = going.plan.target
    report = verify_pages(store, target)
    if is_whole(store, target, report):
        return report
    mine = [damage for damage in report.damages if target.id in damage.commits]
    if as_json:
        print_json(_document(going, report, None, dry_run, damages=mine))
    for damage in mine:
        warn(described(damage))
    raise CorruptStore(
        f"{name(target)} is damaged, so nothing was changed; to learn which commits are whole: "
        f"{command('verify', going.path, '--full')}"
    )


def _check_result(going: _Going, done: Commit) -> None:
    """Opens the store as another process would: the new head must be the state that was asked for.

    Raises:
        CorruptStore: It is not.
    """
    with open_to_read(going.path) as store:
        head = store.head()
        again = store.rollback(lsn=going.lsn, dry_run=True)
    left = again.difference
    if head != done or left.changed or left.added or left.removed or again.values:
        raise CorruptStore(
            f"after the rollback the head is not what was asked for: {name(done)} is not {name(going.plan.target)}. "
            f"Please report this, with the output of {command('log', going.path, '--records')}"
        )


def _undo(store: Store, going: _Going) -> str:
    """The command that brings back what there is now: by commit, or by LSN where values were recorded since it."""
    head = going.plan.head
    if recorded_at(store, head.lsn) == going.now:
        return command("rollback", going.path, "--to", f"commit:{short(head)}")
    return command("rollback", going.path, "--lsn", str(next(iter(store.history())).lsn))


def _finish(
    going: _Going,
    report: VerifyReport | None,
    done: Commit | None,
    dry_run: bool,
    as_json: bool,
    message: str,
    undo: str | None = None,
) -> None:
    if as_json:
        print_json(_document(going, report, done, dry_run, undo=undo))
        return
    if report is not None:
        say(f"verified: {counted(report.pages, 'page')} of {name(going.plan.target)}, {size(report.bytes)}")
        elsewhere = sum(going.plan.target.id not in damage.commits for damage in report.damages)
        if elsewhere:
            warn(f"{counted(elsewhere, 'damage')} elsewhere in the store: {command('verify', going.path, '--full')}")
    say(message, "green" if done else "")
    if undo:
        say(f"to undo: {undo}")


def _document(
    going: _Going,
    report: VerifyReport | None,
    done: Commit | None,
    dry_run: bool,
    *,
    undo: str | None = None,
    damages: list[Damage] | None = None,
) -> dict[str, object]:
    plan = going.plan
    return {
        "store": going.path,
        "dry_run": dry_run,
        "done": done is not None,
        "head": commit_json(plan.head),
        "target": commit_json(plan.target),
        "left_behind": [commit_json(commit) for commit in plan.superseded],
        **difference_json(plan.difference),
        "values": values_json(plan.values, going.now, going.then),
        "verified_pages": report.pages if report else 0,
        "verified_bytes": report.bytes if report else 0,
        "damages": [damage_json(damage) for damage in damages or []],
        "commit": commit_json(done) if done else None,
        "undo": undo,
    }


def _print_plan(going: _Going) -> None:
    plan, difference = going.plan, going.plan.difference
    keys = [*difference.changed, *difference.added, *difference.removed]
    total = len(difference.changed) + len(difference.removed) + difference.unchanged  # those of the head
    print_facts(
        [
            ("from", f"{name(plan.head)} of {when(plan.head.time)}, the head"),
            ("to", f"{name(plan.target)} of {when(plan.target.time)}"),
            ("left behind", _some([name(commit) for commit in plan.superseded]) or "no commit"),
            (
                "changes",
                f"{len(difference.changed):,} of {counted(total, 'key')}, {len(difference.added):,} added, "
                f"{len(difference.removed):,} removed: {size(difference.changed_bytes)}",
            ),
            *([("keys", clean(_some(keys)))] if keys else []),
        ]
    )
    print_values(plan.values, going.now, going.then)
    say()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
