"""``tierload doctor``: what this machine and file system offer, and which way a save and a load would take here."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from tierload.cli.arguments import AsJson
from tierload.cli.output import print_facts, print_json, print_table, say
from tierload.cli.text import clean

__all__ = ["doctor"]


def doctor(
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="A store, or a directory that one may be made in.")
    ] = ".",
    as_json: AsJson = False,
) -> None:
    """Says what this machine and the file system of PATH offer, and which way a save and a load would take there.

    It writes and reads for some seconds in directories of its own under PATH, removes them, and remembers what the
    device did: compression "auto" goes by it. Rates of saves and loads count the state's bytes, so compression can take
    them above what the device moves.
    """
    from tierload.engine.machine import examine

    folder = os.path.abspath(path)
    while not os.path.isdir(folder):  # the nearest directory that exists: a store is made with its parents
        folder = os.path.dirname(folder)
    found = examine(folder)
    way = "past the page cache, with io_uring" if found.io == "direct" else "through the page cache"
    if as_json:
        document = {
            "path": folder,
            "facts": dict(found.facts),
            "ways": [{"way": name, "write": write, "read": read} for name, write, read in found.ways],
            "io": found.io,
            "compression": found.compression,
            "save": found.save,
            "load": found.load,
            "gds": asdict(found.direct) if found.direct else None,
            "gpu": asdict(found.gpu) if found.gpu else None,
        }
        print_json(document)
        return
    print_facts([("path", clean(folder)), *found.facts])
    say()
    ways = list(found.ways)
    if found.direct is not None and found.direct.mode:
        ways.append((f"kvikio and a GPU, {found.direct.path}", found.direct.write, found.direct.read))
    print_table(
        ("way", "write", "read"),
        [(name, _rate(write), _rate(read)) for name, write, read in ways],
        right=("write", "read"),
    )
    say()
    say(f"large data goes {way} here; compression auto chooses {found.compression} for weights")
    say(f"a save of weights: {_rate(found.save)}; the most that was written: {_rate(found.write_ceiling)}")
    say(f"a cold load in place: {_rate(found.load)}; the most that was read: {_rate(found.read_ceiling)}")
    if found.gpu is not None:
        say(f"raw pages of tensors on a GPU: {found.gpu.why}")


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"
