"""Arguments and options that commands share."""

from __future__ import annotations

import re
from typing import Annotated

import typer

__all__ = ["AsJson", "DryRun", "Format", "OptionalWhich", "StorePath", "WhichA", "WhichB", "count_of"]

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
        "--format", metavar="FORMAT", help="safetensors, torch or dcp, where a name does not say.", show_default=False
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]


def count_of(text: str) -> int:
    """The bytes of a size as people write it: ``5GB``, ``512MiB``, ``1000000``."""
    found = re.fullmatch(r"(\d{1,15})\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise typer.BadParameter(f"{text!r} is no size; use one such as 5GB, 512MiB or 1000000")
    unit = 1024 if found[3] else 1000
    power = " KMGT".index(found[2].upper()) if found[2] else 0
    return int(int(found[1]) * unit**power)
