"""The command. Exit codes: 0 fine; 1 something damaged was skipped (it is named on stderr); 2 usage, or no store."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import safetensors

from .report import Damage, Refused, Report
from .safetensors_file import plain, save
from .store import commits, extract


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="rescue", description="Read a commit of a tierload store without tierload.")
    parser.add_argument("store", type=Path, metavar="STORE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--commit", metavar="C", help="a txid, or the id or the beginning of it")
    which.add_argument("--step", metavar="N", type=int, help="the newest commit of this step")
    which.add_argument("--tag", metavar="T")
    parser.add_argument("--list", action="store_true", help="print the commits")
    parser.add_argument("--to", type=Path, metavar="OUT.safetensors", help="the file to write")
    options = parser.parse_args(arguments)
    if options.list == (options.to is not None):
        parser.error("one of --to and --list is needed")
    report = Report()
    try:
        if options.list:
            print("txid", "id", "step", "bytes", "time", "tags", "meta", sep="\t")
            for c in commits(options.store, report):
                step, tags = "-" if c.step is None else c.step, ",".join(map(ascii, c.tags)) or "-"
                print(c.txid, c.id, step, c.raw_bytes, c.time, tags, ascii(c.meta)[1:-1], sep="\t")
        else:
            named = {name: getattr(options, name) for name in ("commit", "step", "tag")}
            tensors, texts = extract(options.store, report, named)
            report.notes += save(tensors, texts | {"tierload.skipped": json.dumps(report.problems)}, options.to)
    except Damage as damage:
        report.problems.append(str(damage))
    except (Refused, OSError, safetensors.SafetensorError) as error:
        print(f"rescue: error: {error}", file=sys.stderr)
        return 2
    finally:
        for kind, lines in (("note", report.notes), ("damaged", report.problems)):
            for line in lines:
                print(f"rescue: {kind}: {plain(line)}", file=sys.stderr)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
