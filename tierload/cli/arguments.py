"""Arguments and options that commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AsJson", "DryRun", "Format", "OptionalWhich", "StorePath", "WhichA", "WhichB"]

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="The store's directory.", show_default=False)]
WhichA = Annotated[str, typer.Argument(metavar="A", help="From this step, tag or commit id.", show_default=False)]
WhichB = Annotated[str, typer.Argument(metavar="B", help="To this one.", show_default=False)]
OptionalWhich = Annotated[
    str | None,
    typer.Argument(metavar="WHICH", help="A step, tag or commit id; without it, the head.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="FORMAT", help="safetensors or torch, where a suffix does not say.", show_default=False
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
