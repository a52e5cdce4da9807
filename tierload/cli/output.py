"""Where results go: tables or one JSON document on stdout; warnings and progress on stderr.

On a terminal rich draws and colours; elsewhere there are plain lines, as wide as they need to be, without escape codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TextIO

from tierload.observe import Progress

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_facts", "print_json", "print_table", "progress", "say", "warn"]


def _terminal(stream: TextIO) -> Console | None:
    """The console of a terminal; None for everything else, which gets plain lines whatever FORCE_COLOR says."""
    if not stream.isatty():
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _line(stream: TextIO, text: str, style: str) -> None:
    console = _terminal(stream)
    if console is not None:
        console.print(text, style=style, soft_wrap=True)
    else:
        stream.write(text + "\n")
        stream.flush()


def say(text: str = "", style: str = "") -> None:
    """A line of the result."""
    _line(sys.stdout, text, style)


def warn(text: str) -> None:
    """A line beside the result."""
    _line(sys.stderr, f"tierload: {text}", "yellow")


def print_json(document: object) -> None:
    """The one document of a command with ``--json``."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        say(f"{name:<{width}}  {value}")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    fold: Sequence[str] = (),
    dim: Sequence[bool] = (),
) -> None:
    """A table.

    ``right`` are the columns of numbers, ``fold`` those that take several lines where the terminal is narrow; ``dim``
    says for each row whether it matters less.
    """
    console = _terminal(sys.stdout)
    if console is None:
        sys.stdout.writelines(line + "\n" for line in _plain_lines(columns, rows, right))
        sys.stdout.flush()
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=column not in fold, overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style="dim" if dim and dim[number] else "")
    console.print(table)


def _plain_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> Iterator[str]:
    lines = [columns, *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
    for line in lines:
        cells = zip(columns, line, widths, strict=True)
        yield "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width) for column, cell, width in cells
        ).rstrip()


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes numbers of bytes as they are done; ``total`` is what to expect."""
    done = 0
    with Progress(title) as shown:

        def add(count: int) -> None:
            nonlocal done
            done += count
            shown.update(done, total)

        yield add
