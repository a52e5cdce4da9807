"""Where results go: tables or one JSON document on stdout; warnings and progress on stderr.

On a terminal rich draws and colours; elsewhere there are plain lines, as wide as they need to be, without escape codes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierload.cli.text import size

__all__ = ["print_facts", "print_json", "print_table", "progress", "say", "warn"]

_PROGRESS_LINE_S = 15.0  # between two lines of progress where there is no terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error, and would exit with 1, which means damage here


def _console(*, stderr: bool = False) -> Console:
    # Made anew each time, since tests replace the streams. FORCE_COLOR does not turn a pipe into a terminal here.
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return _Console(stderr=stderr, force_terminal=terminal, highlight=False, markup=False, emoji=False)


def say(text: str = "", style: str = "") -> None:
    """A line of the result."""
    _console().print(Text(text, style), soft_wrap=True)


def warn(text: str) -> None:
    """A line beside the result."""
    _console(stderr=True).print(Text(f"tierload: {text}", "yellow"), soft_wrap=True)


def print_json(document: object) -> None:
    """The one document of a command with ``--json``."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name, _ in facts)
    console = _console()
    for name, value in facts:
        console.print(Text.assemble((f"{name:<{width}}  ", "bold"), value), soft_wrap=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), dim: Sequence[bool] = ()
) -> None:
    """A table: ``right`` are the columns of numbers; ``dim`` says for each row whether it matters less."""
    if sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for number, column in enumerate(columns):
            table.add_column(
                column, justify="right" if column in right else "left", no_wrap=number == 0, overflow="fold"
            )
        for number, row in enumerate(rows):
            table.add_row(*(Text(cell) for cell in row), style="dim" if dim and dim[number] else "")
        _console().print(table)
        return
    widths = [max(len(row[number]) for row in [columns, *rows]) for number in range(len(columns))]
    for row in [columns, *rows]:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    sys.stdout.flush()


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes numbers of bytes as they are done; ``total`` is what to expect."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        parts = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn(title), BarColumn(), *parts, console=_console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done = 0
    last = time.monotonic()

    def add(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= _PROGRESS_LINE_S:
            last = time.monotonic()
            sys.stderr.write(f"{title}: {size(done)} of about {size(total)}\n")
            sys.stderr.flush()

    yield add
