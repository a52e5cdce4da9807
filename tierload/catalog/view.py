"""The commits of an open native store as values, and the names by which people ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable

from tierload import _native
from tierload.catalog.line import Line
from tierload.catalog.text import decode_text
from tierload.errors import CommitNotFound, CorruptStore, InvalidRequest
from tierload.types import Commit

__all__ = ["CatalogView"]

_SHOWN = 5  # commits that an error lists


def _meta(record: _native.CommitRecord) -> dict[str, object]:
    try:
        meta = json.loads((record.meta or b"{}").decode())
    except (ValueError, RecursionError) as error:
        raise CorruptStore(f"commit {record.id[:12]} (step {record.step}): its meta is no JSON: {error}") from None
    if not isinstance(meta, dict):
        raise CorruptStore(f"commit {record.id[:12]} (step {record.step}): its meta is no JSON object")
    return meta


class CatalogView:
    """The commits of a store, as they are now. ``decode`` turns the JSON of a metric into its value.

    A ``Commit`` is made when it is first asked for: a store may have thousands, and a save needs one or two of them.
    """

    def __init__(self, native: _native.Store, decode: Callable[[object], object]) -> None:
        self._records = {record.txid: record for record in native.commits()}
        self._decode = decode
        self._made: dict[int, Commit] = {}
        self.line = Line(self._records.values(), native.head)
        self.tags = {decode_text(name): txid for name, txid in native.tags().items()}
        self._tags_of: dict[int, list[str]] = {}
        for tag, txid in self.tags.items():
            self._tags_of.setdefault(txid, []).append(tag)

    def append(self, record: _native.CommitRecord) -> None:
        """A commit without tags has been added to the store; it is the head now."""
        for txid in self.line.txids[:1]:
            self._made.pop(txid, None)  # it said that it was the head
        self._records[record.txid] = record
        self.line.append(record.txid)

    def __contains__(self, txid: object) -> bool:
        return txid in self._records

    def __getitem__(self, txid: int) -> Commit:
        if txid not in self._made:
            self._made[txid] = self._make(self._records[txid])
        return self._made[txid]

    def _make(self, record: _native.CommitRecord) -> Commit:
        meta = _meta(record)
        metrics = self._decode(meta["metrics"]) if "metrics" in meta else {}
        return Commit(
            id=record.id,
            txid=record.txid,
            lsn=record.lsn,
            step=record.step,
            parent=self._id(record.parent),
            source=self._id(record.source),
            time=record.time / 1e9,
            raw_bytes=record.raw_bytes,
            written_bytes=record.written_bytes,
            superseded=record.txid not in self.line,
            head=record.txid in self.line.txids[:1],
            tags=tuple(sorted(self._tags_of.get(record.txid, ()))),
            metrics=metrics if isinstance(metrics, dict) else {},
            note=str(meta.get("note", "")),
            io=str(meta.get("io", "")),
            ranks=record.ranks,
        )

    def _id(self, txid: int) -> str | None:
        record = self._records.get(txid)
        return record.id if record else None

    @property
    def commits(self) -> list[Commit]:
        """All commits, newest first."""
        return [self[txid] for txid in sorted(self._records, reverse=True)]

    @property
    def sources(self) -> dict[int, int]:
        """The txids of rollbacks, and of the commits that they went back to."""
        return {record.txid: record.source for record in self._records.values() if record.rollback}

    @property
    def head(self) -> Commit | None:
        """The newest commit, or None."""
        return self[self.line.txids[0]] if self.line.txids else None

    def line_of(self, commit: Commit) -> Line:
        """The line as it would be if this commit were the head."""
        return Line(self._records.values(), commit.txid)

    def back(self, steps: int) -> Commit:
        """The commit ``steps`` positions behind the head on its line.

        Raises:
            CommitNotFound: The line is shorter.
            InvalidRequest: ``steps`` is less than 1.
        """
        if steps < 1:
            raise InvalidRequest(f"steps is {steps}; use the number of commits to go back, from 1 up")
        if steps >= len(self.line.positions):
            raise CommitNotFound(
                f"the head's line has {len(self.line.positions)} commits, so it cannot go back {steps}; "
                f"the oldest is {self._describe(self.line.positions[-1:])}"
            )
        return self[self.line.positions[steps]]

    def find(self, *, step: int | None = None, commit: str | Commit | None = None, tag: str | None = None) -> Commit:
        """The commit with this step (newest on the head's line), id (or the beginning of one) or tag; else the head.

        Raises:
            CommitNotFound: There is none; the message names what there is.
            InvalidRequest: More than one of the three is given.
        """
        if sum(value is not None for value in (step, commit, tag)) > 1:
            raise InvalidRequest("give one of step, commit and tag, not several")
        if tag is not None:
            if tag not in self.tags:
                raise CommitNotFound(f"no tag {tag!r}; there are: {', '.join(sorted(self.tags)) or 'none'}")
            return self[self.tags[tag]]
        if isinstance(commit, Commit):
            commit = commit.id
        if commit is not None:
            return self._by_id(commit)
        if step is not None:
            return self._by_step(step)
        if self.head is None:
            raise CommitNotFound("the store has no commit yet: nothing has been saved")
        return self.head

    def _by_id(self, text: str) -> Commit:
        prefix = text.lower()
        found = [txid for txid, record in self._records.items() if record.id.startswith(prefix)] if prefix else []
        if len(found) == 1:
            return self[found[0]]
        if found:
            raise CommitNotFound(f"{text!r} is the beginning of {len(found)} ids; give more digits")
        raise CommitNotFound(f"no commit {text!r}; the newest are {self._describe(sorted(self._records)[::-1])}")

    def _by_step(self, step: int) -> Commit:
        for txid in self.line.txids:
            if self._records[txid].step == step:
                return self[txid]
        left_behind = [txid for txid, record in self._records.items() if record.step == step]
        if left_behind:
            commit = self[max(left_behind)]
            raise CommitNotFound(
                f"step {step} was left behind by a rollback; it can still be had as commit {commit.id[:12]}"
            )
        raise CommitNotFound(f"no commit with step {step}; the newest are {self._describe(self.line.txids)}")

    def _describe(self, txids: list[int]) -> str:
        shown = [self[txid] for txid in txids[:_SHOWN]]
        return ", ".join(f"{c.id[:12]} (step {c.step})" for c in shown) or "none"
