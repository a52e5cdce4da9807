"""How values look: to people, and in JSON."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping

from tierload.observe import size
from tierload.types import Commit

__all__ = [
    "clean",
    "command",
    "commit_json",
    "counted",
    "name",
    "pairs",
    "short",
    "shown",
    "size",
    "step",
    "to_json",
    "when",
]


def clean(text: str) -> str:
    """Text with everything escaped that is not printable: a store that somebody else made may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def counted(count: int, noun: str) -> str:
    """A number and its noun: ``1 page``, ``2 pages``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def when(seconds: float) -> str:
    """A time, in the local zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def short(commit: Commit) -> str:
    """The beginning of a commit's id, as people copy it."""
    return commit.id[:12]


def name(commit: Commit) -> str:
    """A commit in a sentence."""
    return f"{short(commit)} ({'no step' if commit.step is None else f'step {commit.step}'})"


def step(commit: Commit) -> str:
    """A commit's step in a table."""
    return "-" if commit.step is None else str(commit.step)


def shown(value: object) -> str:
    """A metric or a recorded value."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return clean(value if isinstance(value, str) else repr(value))


def pairs(values: Mapping[str, object]) -> str:
    """Metrics on one line."""
    return " ".join(f"{clean(str(key))}={shown(value)}" for key, value in values.items())


def command(*words: str) -> str:
    """A command line to copy."""
    return shlex.join(["tierload", *words])


def to_json(value: object) -> object:
    """A value as JSON has it. Numbers that are not finite become texts (``"nan"``, ``"inf"``, ``"-inf"``), and so does
    what JSON has no word for; sets are arrays."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's scalars and arrays
        return to_json(value.tolist())
    return str(value)


def commit_json(commit: Commit) -> dict[str, object]:
    """A commit as every document has it. ``time`` is seconds since 1970."""
    return {
        "id": commit.id,
        "step": commit.step,
        "time": commit.time,
        "lsn": commit.lsn,
        "parent": commit.parent,
        "source": commit.source,
        "head": commit.head,
        "superseded": commit.superseded,
        "tags": list(commit.tags),
        "metrics": to_json(commit.metrics),
        "note": commit.note,
        "io": commit.io,
        "raw_bytes": commit.raw_bytes,
        "written_bytes": commit.written_bytes,
        "ranks": commit.ranks,
    }
