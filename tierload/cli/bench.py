"""``tierload bench``: measurements that compare what tierload does with what this machine can do."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, count_of
from tierload.cli.output import print_facts, print_json, print_table, progress, say
from tierload.cli.text import clean, size

if TYPE_CHECKING:
    from tierload.engine.pacing import LatencyShare
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


@bench.command()
def pacing(
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="A directory on the file system to measure.")] = ".",
    amount: Annotated[
        str | None,
        typer.Option("--bytes", "-b", metavar="SIZE", help="What each save writes (512MiB).", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option("-n", min=1, metavar="N", help="Saves in each way.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Saves incompressible numbers in segments of several sizes, and with several bounds on a segment's time.

    Latency is from a segment's first byte until it is durable; large segments use more of the bandwidth, small ones are
    durable sooner. All ways run in turn, each time in a new store of its own in DIR, which is removed. 100% is the best
    rate of the run, which may be that of raw writes to the device. Where less than 1 GiB is free, a save writes half of
    what is.
    """
    from tierload.engine.pacing import INTERVALS_MS, SEGMENT_MIB, bytes_that_fit, measure

    wanted = None if amount is None else count_of(amount)
    nbytes = bytes_that_fit(folder, wanted)
    with progress("saving", rounds * nbytes * (len(SEGMENT_MIB) + len(INTERVALS_MS))) as done:
        found = measure(folder, nbytes=nbytes, rounds=rounds, progress=done)
    path = os.path.abspath(folder)
    if as_json:
        print_json({"path": path, "bytes": nbytes, "rounds": rounds} | asdict(found))
        return
    print_facts(
        [
            ("path", clean(path)),
            ("saves", f"{rounds:,} of {size(nbytes)} in each way"),
            ("raw writes", _rate(found.device)),
            ("best rate", f"{_rate(found.best)}: 100%"),
        ]
    )
    latencies = ("mean ms", "P99 ms", "max ms")
    say()
    print_table(
        ("segments of", *latencies, "rate", "share"),
        [(f"{row.segment_mib} MiB", *_latencies(row), _rate(row.rate), f"{row.share:.0%}") for row in found.sizes],
        right=("segments of", *latencies, "rate", "share"),
    )
    say()
    print_table(
        ("flush_interval_ms", *latencies, "late", "rate", "share"),
        [
            (
                str(row.interval_ms),
                *_latencies(row),
                f"{row.late:,} of {row.segments:,}",
                _rate(row.rate),
                f"{row.share:.0%}",
            )
            for row in found.intervals
        ],
        right=("flush_interval_ms", *latencies, "late", "rate", "share"),
    )
    say()
    say("published for another machine: 128 MB 320 ms at 92%; 8 MB 42 ms at 67%")


def _latencies(row: LatencyShare) -> tuple[str, ...]:
    return tuple(f"{value:,.1f}" for value in (row.mean, row.p99, row.max))


def _rate(value: float) -> str:
    return f"{value / 1e6:,.0f} MB/s"
