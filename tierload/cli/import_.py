"""``tierload import``: files of other formats as one commit."""

from __future__ import annotations

from typing import Annotated

import typer

from tierload.cli.arguments import AsJson, Format, StorePath
from tierload.cli.export import convert_json, print_kept
from tierload.cli.output import print_json, say
from tierload.cli.text import clean, counted, name

__all__ = ["import_"]


def import_(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Files, indexes of shards, or folders of them.", show_default=False),
    ],
    path: StorePath,
    step: Annotated[int | None, typer.Option(metavar="N", help="The commit's step.", show_default=False)] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="NAME", help="Tag the commit; may be given again.")
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="A note for the commit.", show_default=False)] = "",
    form: Format = None,
    as_json: AsJson = False,
) -> None:
    """Saves files of safetensors or torch.save, or directories of DCP, as one commit; STORE is made when not there.

    A file, the shards of one, or a directory is the state itself; several become entries by their names without suffix.
    Files of torch are read with weights_only: nothing in them is run. After the commit, what the store holds is
    compared with the files, tensor by tensor. When a file is damaged, nothing is committed.
    """
    from tierload.convert import import_state

    report = import_state(sources, path, step=step, tags=tags or (), note=note, format=form)
    if as_json:
        print_json({"store": path} | convert_json(report))
        return
    say(f"{counted(len(report.files), 'file')} ({report.format}) -> {name(report.commit)}")
    print_kept(report)
    for file in report.skipped:
        say(f"not read: {clean(file)}", "dim")
