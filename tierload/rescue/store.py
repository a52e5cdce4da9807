"""What a caller wants of a store: its commits, and the tensors of one of them."""

import json
import os
from pathlib import Path
from typing import Any

from .catalog import Commit, open_catalog
from .manifest import Manifest, Tensor
from .report import Damage, Report
from .tensors import tensors_of
from .together import Together


def read(
    store: str | os.PathLike[str],
    commit: str | int | None = None,
    step: int | None = None,
    tag: str | None = None,
    report: Report | None = None,
) -> dict[str, Tensor]:
    """Every tensor of a commit by its key: dtype name, shape, row-major bytes. Of a commit by several ranks tensors are
    whole, and those that a rank has of its own are below `~own/<rank>/`.

    `commit` is a txid, or the id or the beginning of it. When none is named it is the newest of the head's line whose
    manifest and segments are whole. What is damaged is left out and named in `report.problems`; without a report,
    damage raises `Damage`.
    """
    own = report or Report()
    tensors, _ = extract(Path(store), own, {"commit": commit, "step": step, "tag": tag})
    own.check(report)
    return tensors


def commits(store: str | os.PathLike[str], report: Report | None = None) -> list[Commit]:
    """The commits of a store in the order of their txids; without a report, damage raises `Damage`."""
    own = report or Report()
    found = [commit for _, commit in sorted(open_catalog(Path(store), own).commits.items())]
    own.check(report)
    return found


def extract(store: Path, report: Report, which: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a commit, and everything else of it as text."""
    catalog = open_catalog(store, report)
    commit, manifest, where = _readable(store, catalog.select(**which), report)
    facts = {name: value for name, value in vars(commit).items() if name not in ("meta", "row", "changes")}
    values = {key: value.decode("utf-8", "backslashreplace") for key, value in catalog.values.items()}
    texts = {"commit": json.dumps(facts), "meta": commit.meta, "values": json.dumps(values)}
    texts |= manifest.texts()
    return tensors_of(manifest, where), {f"tierload.{name}": text for name, text in texts.items()}


def _readable(store: Path, wanted: list[Commit], report: Report) -> tuple[Commit, Manifest | Together, str]:
    """The first commit that is whole, else the first whose manifest is; why others were passed over is reported."""
    second = None
    for commit in wanted:
        where = f"commit {commit.txid} ({commit.id})"
        try:
            several = commit.ranks > 1
            manifest = Together(store, commit, report) if several else Manifest(store, commit.row, report)
        except ValueError as damage:
            report.problems.append(f"{where}: {damage}")
            continue
        second = second or (commit, manifest, where)
        missing = manifest.missing()
        if not missing or len(wanted) == 1:
            report.problems += [f"{where}: {line}" for line in manifest.lost]
            return commit, manifest, where
        report.problems.append(f"{where}: {'; '.join(missing)}")
    if second is None:
        raise Damage(report.problems.pop())
    return second
