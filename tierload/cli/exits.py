"""Exit codes: every error becomes one line on stderr and a number that scripts can rely on."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from tierload.cli.text import clean
from tierload.errors import (
    CommitNotFound,
    CorruptStore,
    InvalidRequest,
    KeyMismatch,
    StoreBusy,
    StoreFenced,
    StoreNotFound,
    StorePoisoned,
    TierloadError,
    UnsupportedFormat,
    UnsupportedValue,
)

__all__ = ["CODES_HELP", "DAMAGED", "INTERRUPTED", "LEFT_OUT", "Group"]

DAMAGED = 1
_USAGE = 2
_NOT_FOUND = 3
_BUSY = 4
_REFUSED = 5
_TOO_NEW = 6
LEFT_OUT = 7
INTERRUPTED = 130
_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended

CODES_HELP = """\b
Exit codes:
  0    done, and nothing wrong was found
  1    damage was found
  2    wrong usage, or a value that cannot be stored or converted; nothing was done
  3    no store there, or no such commit, tag, step or key
  4    another process holds the store
  5    the operating system refused: disk full, permissions, a failed disk
  6    the store needs a newer release
  7    exported, but something was left out, which the format cannot hold
  130  interrupted, or the question was not answered with yes
  141  whoever read the output through a pipe went away"""

# The first that fits counts. What is left is the operating system's: StoreIOError and OSError.
_CODES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int], ...] = (
    ((InvalidRequest, UnsupportedValue), _USAGE),
    ((StoreNotFound, CommitNotFound, KeyMismatch), _NOT_FOUND),
    ((StoreBusy, StoreFenced), _BUSY),
    (UnsupportedFormat, _TOO_NEW),
    (CorruptStore, DAMAGED),
    ((StorePoisoned, OSError), _REFUSED),
    (TierloadError, DAMAGED),
)


def _code(error: Exception) -> int:
    return next(code for kinds, code in _CODES if isinstance(error, kinds))


class Group(TyperGroup):
    """The commands together: the one place where errors end. An error that nobody expected keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        # A terminal or a pipe that cannot show a character gets it escaped rather than an error.
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would flush, and fail, again
            raise typer.Exit(_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            typer.echo("tierload: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except (TierloadError, OSError) as error:
            typer.echo(f"tierload: {clean(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(_code(error)) from None
