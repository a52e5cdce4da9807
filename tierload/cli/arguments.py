"""Arguments and options that commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AsJson", "DryRun", "OptionalWhich", "StorePath", "Which"]

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="The store's directory.", show_default=False)]
Which = Annotated[str, typer.Argument(metavar="WHICH", help="A step, tag or commit id.", show_default=False)]
OptionalWhich = Annotated[
    str | None, typer.Argument(metavar="[WHICH]", help="A step, tag or commit id (the head).", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
