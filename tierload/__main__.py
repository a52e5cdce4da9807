"""``python -m tierload``: the same as the command ``tierload``."""

from tierload.cli import app

app(prog_name="tierload")
