"""The command ``tierload``: look into a store, verify it, go back in it, tidy it, move states in and out.

A command imports the engine (and so torch) when it runs, not before: ``tierload --help`` is fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tierload import __version__
from tierload.cli.bench import bench
from tierload.cli.diff import diff
from tierload.cli.doctor import doctor
from tierload.cli.exits import CODES_HELP, Group
from tierload.cli.export import export
from tierload.cli.gc import gc
from tierload.cli.heat import heat
from tierload.cli.import_ import import_
from tierload.cli.log import log
from tierload.cli.rollback import rollback
from tierload.cli.show import show
from tierload.cli.tag import tag
from tierload.cli.top import top
from tierload.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="tierload",
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's panels cut long lines in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    epilog=CODES_HELP,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tierload {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Looks after a tierload store: a directory of checkpoints.

    log, show, diff, heat, verify, top and export only read, and work beside a live run. rollback, tag, gc and import
    write: they are refused while another process holds the store. WHICH is a step, a tag or (the beginning of) a commit
    id; step:100, tag:best and commit:5b54 say which of them is meant.
    """


for command in (log, show, diff, heat, verify, rollback, tag, gc, export, doctor, top):
    app.command()(command)
app.command("import")(import_)
app.add_typer(bench, name="bench")
