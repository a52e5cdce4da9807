"""``tierload top``: what the process that writes to a store has in flight."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, StorePath
from tierload.cli.output import print_facts, print_json, print_table, say
from tierload.cli.text import clean, counted, size
from tierload.types import LiveStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["top"]

_LOOK_S = 0.5
_SILENT_S = 5.0  # a writer with saves in flight says something several times a second


def top(
    path: StorePath,
    once: Annotated[bool, typer.Option("--once", help="Show what there is now, and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows the saves that another process has in flight, until you press Ctrl-C or that process is gone.

    It reads a small file that the writer keeps in the store while it saves in the background; --json shows it once.
    """
    from tierload.engine import Store
    from tierload.engine.live import look

    Store(path, mode="r").close()  # a path without a store is an error
    status = look(path)
    if as_json:
        print_json({"store": path, "alive": status is not None and _alive(status), **_document(status)})
        return
    if status is None:
        say("nothing has been saved in the background here, or the process that did has closed the store")
        return
    if once:
        _print(status)
        return
    try:
        (_draw if sys.stdout.isatty() else _follow)(path, status)
    except KeyboardInterrupt:
        return


def _alive(status: LiveStatus) -> bool:
    """Whether the process is still there; of another machine's, whether it has said something lately."""
    if status.host != socket.gethostname():
        return time.time() - status.time < _SILENT_S
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _document(status: LiveStatus | None) -> dict[str, object]:
    return {"pid": None, "saves": []} if status is None else asdict(status)


def _writer(status: LiveStatus) -> str:
    ended = "" if _alive(status) else ", which has ended: what it had in flight was never committed"
    return f"process {status.pid} on {clean(status.host)}{ended}"


def _rows(status: LiveStatus) -> list[tuple[str, ...]]:
    return [
        (
            "-" if save.step is None else str(save.step),
            clean(save.progress.phase),
            size(save.progress.staged_bytes),
            size(save.progress.written_bytes),
            size(save.progress.total_bytes),
            f"{save.seconds:.1f} s",
        )
        for save in status.saves
    ]


_COLUMNS = ("step", "phase", "copied", "written", "of", "since the call")
_RIGHT = ("step", "copied", "written", "of", "since the call")


def _print(status: LiveStatus) -> None:
    print_facts([("writer", _writer(status)), ("skipped", counted(status.skipped, "save"))])
    if status.saves:
        print_table(_COLUMNS, _rows(status), right=_RIGHT)
    else:
        say("no save is in flight")


def _follow(path: str, found: LiveStatus) -> None:
    """A line for each save in flight, as it moves."""
    from tierload.engine.live import look

    status: LiveStatus | None = found
    shown: list[tuple[str, ...]] = []
    while status is not None and _alive(status):
        rows = _rows(status)
        for step, phase, copied, written, total, since in rows:
            if (step, phase, copied, written) not in shown:
                say(f"step {step}: {phase}, {copied} copied and {written} written of {total}, {since} since the call")
        shown = [row[:4] for row in rows]
        time.sleep(_LOOK_S)
        status = look(path)
    say("the writer has closed the store" if status is None else f"writer: {_writer(status)}")


def _draw(path: str, found: LiveStatus) -> None:
    """Bars, drawn anew several times a second."""
    from rich.console import Console
    from rich.live import Live

    from tierload.engine.live import look

    console = Console(highlight=False, markup=False, emoji=False)
    status: LiveStatus | None = found
    with Live(console=console, auto_refresh=False) as live:
        while status is not None:
            live.update(_picture(status), refresh=True)
            if not _alive(status):
                break
            time.sleep(_LOOK_S)
            status = look(path)
    if status is None:
        say("the writer has closed the store")


def _picture(status: LiveStatus) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in (*_COLUMNS, ""):
        table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=True)
    for row, save in zip(_rows(status), status.saves, strict=True):
        done = save.progress.written_bytes
        table.add_row(*row, ProgressBar(total=max(save.progress.total_bytes, 1), completed=done, width=30))
    head = f"writer: {_writer(status)}; {counted(status.skipped, 'save')} skipped"
    return Group(head, table if status.saves else "no save is in flight")
