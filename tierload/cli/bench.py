"""``tierload bench``: measurements that compare what tierload does with what this machine can do."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson
from tierload.cli.output import print_facts, print_json, print_table, say
from tierload.cli.text import clean, size

if TYPE_CHECKING:
    from tierload.engine.wal import WayTimes

__all__ = ["bench"]

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _main() -> None:
    """Measures this machine: what durability costs here, whichever way it is asked for."""


@bench.command()
def wal(
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="A directory on the file system to measure.")] = ".",
    records: Annotated[int, typer.Option("-n", min=1, metavar="N", help="Records of each size in each way.")] = 2000,
    as_json: AsJson = False,
) -> None:
    """Makes small records durable, one at a time, in each way that Linux has for it and in a store's journal.

    All ways run in turn, in files of their own in DIR, which are removed. Times are in microseconds, from the call
    until the record would survive a power cut; "to posix" compares means with those of pwrite and fdatasync into a file
    that was filled with zeros before. What is refused here is shown with the reason. The last line is not durable: it
    shows how much of the time is the flush.
    """
    from tierload.engine.wal import RECORD_BYTES, WAYS, facts, measure

    found = facts(folder)
    rows = measure(folder, records=records)
    if as_json:
        ways = [asdict(row) for row in rows]
        print_json({"path": os.path.abspath(folder), "records": records, "facts": dict(found), "ways": ways})
        return
    many = f"{records:,} of each size in each way"
    print_facts([("path", clean(os.path.abspath(folder))), *found, ("records", many)])
    for record_bytes in RECORD_BYTES:
        say()
        numbers = ("mean µs", "P50 µs", "P99 µs", "to posix")
        print_table(
            (f"a record of {size(record_bytes)}", *numbers, ""),
            [(WAYS[row.way], *_cells(row)) for row in rows if row.record_bytes == record_bytes],
            right=numbers,
        )


def _cells(row: WayTimes) -> tuple[str, ...]:
    times = [row.mean, row.p50, row.p99]
    cells = ["-" if value is None else f"{value:,.1f}" for value in times]
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    note = clean(row.refused) or ("" if row.durable else "not durable")
    return (*cells, ratio, note)
