"""Progress on stderr: a bar on a terminal, and a line now and then elsewhere.

It is shown while a process ends too. So nothing here starts a thread, which an interpreter that ends refuses, and a
stream that is gone is no error: the work is what matters.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "say", "size"]

_LINE_S = 10.0  # between two lines where there is no terminal
_DRAW_S = 0.1  # between two pictures of a bar


def size(count: int) -> str:
    """A number of bytes."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":
            break
    return f"{value:,.1f} {unit}"


def say(line: str) -> None:
    """A line on stderr, if there is one that takes it."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
    except (OSError, ValueError):  # its reader is gone; it is closed
        pass


class Progress:
    """Shows how far a work is, until the ``with`` block ends; it leaves nothing on a terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar: Bar | None = None
        self._last_s = time.monotonic()
        try:
            if sys.stderr is not None and sys.stderr.isatty():
                self._bar = _bar_of(title)
                self._bar.start()
        except (OSError, ValueError):
            self._bar = None

    def update(self, done: int, total: int, text: str = "") -> None:
        """``done`` of about ``total`` bytes are done; ``text`` is what is being done. To be called as often as one
        likes."""
        now_s = time.monotonic()
        if now_s - self._last_s < (_LINE_S if self._bar is None else _DRAW_S):
            return
        self._last_s = now_s
        if self._bar is None:
            say(f"{self._title}: {size(done)} of about {size(total)}{text and ', '}{text}")
            return
        try:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, text=text, refresh=True)
        except (OSError, ValueError):
            self._bar = None

    def close(self) -> None:
        """Takes the bar away."""
        bar, self._bar = self._bar, None
        try:
            if bar is not None:
                bar.stop()
        except (OSError, ValueError):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bar_of(title: str) -> Bar:
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[text]}", markup=False),
    )
    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    # The streams stay the program's own, and there is no thread that redraws.
    bar = rich.Progress(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    bar.add_task(title, total=None, text="")
    return bar
