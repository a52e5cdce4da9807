"""Which commit a person means: a step, a tag, or the beginning of an id."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from tierload.cli.text import name
from tierload.errors import CommitNotFound, InvalidRequest
from tierload.types import Commit

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["find"]

_ID_DIGITS_MIN = 8  # of a text that is all decimal digits; shorter ones are steps that do not exist


def find(store: Store, which: str | None) -> Commit:
    """The commit that ``which`` names; the head for None.

    ``step:``, ``tag:`` and ``commit:`` say what it is. Else decimal digits are a step when the head's line has it; then
    come tags, then ids.

    Raises:
        CommitNotFound: There is none.
        InvalidRequest: It names two commits, one by step and one by tag.
    """
    if which is None:
        return store.find()
    kind, colon, rest = which.partition(":")
    if colon and kind == "step":
        return store.find(step=_step(rest))
    if colon and kind == "tag":
        return store.find(tag=rest)
    if colon and kind == "commit":
        return store.find(commit=rest)
    tagged = store.tags().get(which)
    if not (which.isascii() and which.isdecimal()):
        if tagged is None and set(which) <= set(string.hexdigits):
            return store.find(commit=which)
        return store.find(tag=which)
    try:
        by_step = store.find(step=int(which))
    except CommitNotFound:
        if tagged is None and len(which) < _ID_DIGITS_MIN:
            raise
        return tagged or store.find(commit=which)
    if tagged is not None and tagged.id != by_step.id:
        raise InvalidRequest(
            f"{which} is ambiguous: a step of commit {name(by_step)} and a tag of commit {name(tagged)}; "
            f"say step:{which} or tag:{which}"
        )
    return by_step


def _step(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"step:{text} names no step; use a whole number, as in step:100") from None
