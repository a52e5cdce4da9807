"""``tierload export``: a commit as a file that others read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, Format, StorePath, count_of
from tierload.cli.exits import LEFT_OUT
from tierload.cli.opening import reading
from tierload.cli.output import print_json, print_table, say
from tierload.cli.text import clean, commit_json, counted, name, size

if TYPE_CHECKING:
    from tierload.convert import ConvertReport

__all__ = ["convert_json", "export", "print_kept"]

_SHOWN = 8  # ties and changed keys that are listed; --json has all


def export(
    path: StorePath,
    to: Annotated[str, typer.Option(metavar="PATH", help="The file, or folder of shards, to write.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="The commit of this step.", show_default=False)] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="ID", help="The commit of this id, or its beginning.", show_default=False)
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="The commit of this tag.", show_default=False)] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only keys that match; may be given again.", show_default=False),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="What is at KEY, as if it were the whole state.", show_default=False),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Shards with an index, each of at most this (5GB).", show_default=False),
    ] = None,
    form: Format = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Writes a commit as a safetensors file, shards with an index, a torch.save file, or a directory of DCP.

    The suffix of PATH says the format: .safetensors, or .pt, .pth, .bin or .ckpt; a folder gets model.safetensors, and
    with --format dcp PATH is a checkpoint that torch.distributed.checkpoint loads. What was written is read back and
    compared, tensor by tensor, before it gets its name. What the format cannot hold is listed, and the exit code is
    then 7.
    """
    limit = None if max_shard_size is None else count_of(max_shard_size)
    from tierload.convert import export_state

    with reading(path) as store:
        report = export_state(
            store,
            to,
            step=step,
            commit=commit,
            tag=tag,
            keys=keys or None,
            root=root,
            format=form,
            max_shard_bytes=limit,
            force=force,
        )
        if as_json:
            print_json({"store": path} | convert_json(report))
        else:
            _print(report)
    if report.left_out:
        raise typer.Exit(LEFT_OUT)


def convert_json(report: ConvertReport) -> dict[str, object]:
    """A report of a conversion, for a document."""
    return {
        "commit": commit_json(report.commit),
        "format": report.format,
        "files": list(report.files),
        "tensors": report.tensors,
        "bytes": report.bytes,
        "values": report.values,
        "ties": dict(report.ties),
        "changed": [{"key": key, "how": how} for key, how in report.changed],
        "left_out": [{"key": key, "why": why} for key, why in report.left_out],
        "skipped": list(report.skipped),
        "own": list(report.own),
    }


def print_kept(report: ConvertReport) -> None:
    """What a conversion kept: counts, and ties by name."""
    values = f", {counted(report.values, 'other value')}" if report.values else ""
    tied = f", {counted(len(report.ties), 'tie')}" if report.ties else ""
    say(f"{counted(report.tensors, 'tensor')}, {size(report.bytes)}{values}{tied}: each was read back and is equal")
    _some("tied", [(alias, f"to {stored}") for alias, stored in report.ties.items()])


def _some(kind: str, pairs: list[tuple[str, str]]) -> None:
    if pairs:
        rows = [(clean(key), clean(text)) for key, text in pairs[:_SHOWN]]
        say()
        print_table((kind, ""), rows, fold=(kind, ""))
        if len(pairs) > _SHOWN:
            say(f"and {len(pairs) - _SHOWN:,} more; --json has all")


def _print(report: ConvertReport) -> None:
    files = report.files[0] if len(report.files) == 1 else f"{report.files[0]} and {len(report.files) - 1:,} more"
    say(f"{name(report.commit)} -> {clean(files)} ({report.format})")
    print_kept(report)
    _some("own", [(key, "each rank has its own: that of rank 0 was taken") for key in report.own])
    _some("changed", list(report.changed))
    if report.left_out:
        say()
        rows = [(clean(key), clean(why)) for key, why in report.left_out]
        print_table(("LEFT OUT", "why"), rows, fold=("LEFT OUT", "why"))
        say(
            f"{counted(len(report.left_out), 'key')} left out: the file is whole, but is not all of the commit",
            "bold red",
        )
