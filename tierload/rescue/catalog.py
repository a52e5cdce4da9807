"""What the journal says there is: commits, tags and values (docs/FORMAT.md sections 5.2 to 5.5 and 10)."""

from bisect import bisect_right
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from .files import Cursor
from .journal import RecordHeader, journals, read_super
from .report import Damage, Refused, Report

SNAPSHOT, COMMIT, CHANGE, TAG, COLLECT = range(1, 6)  # types of records
Row = namedtuple("Row", ["rank", "epoch", "txid", "length", "digest"])  # a root row: it pins a manifest or a root file
MAX_RANKS = 1 << 16
ROW = "<I4xQQQ16s16x"
Change = tuple[str, bytes | None, bytes | None]  # key, value before, value after


@dataclass
class Commit:
    """A commit of the catalog; `meta` is JSON text, `previous` the id of the commit before in the journal. `row` pins
    the manifest, or where `ranks` is larger than 1 the root file."""

    id: str
    txid: int
    parent: int
    source: int
    step: int | None
    raw_bytes: int
    lsn: int
    time: int
    previous: str
    meta: str
    ranks: int
    row: Row
    changes: list[Change]
    tags: list[str] = field(default_factory=list)


def _change(cursor: Cursor) -> Change:
    op, key_length, *rest = cursor.unpack("<B3xIIIQQ")
    key, values = cursor.text(key_length), list[bytes | None]()
    for length, digest in zip(rest[:2], rest[2:], strict=True):
        values.append(None if length == 0xFFFFFFFF else cursor.take(length))
        if digest != (0 if values[-1] is None else xxhash.xxh3_64_intdigest(values[-1])):
            raise Damage(f"CHANGE of {key!r}: a value does not match its digest")
    cursor.align()
    before, after = values
    if op != (2 if after is None else 1):
        raise Damage(f"CHANGE of {key!r}: operation {op} does not fit its values")
    return key, before, after


def _commit(cursor: Cursor, lsn: int, time: int) -> Commit:
    txid, parent, source, step, flags, ranks, previous, raw, _, length, count = cursor.unpack("<QQQqII16sQQII")
    if not 1 <= ranks <= MAX_RANKS:
        raise Damage(f"commit {txid}: {ranks} ranks")
    row = Row(*cursor.unpack(ROW))
    meta, name = cursor.text(length), f"{xxhash.xxh3_128_intdigest(cursor.data):032x}"
    cursor.align()
    step, previous = step if flags & 1 else None, f"{int.from_bytes(previous, 'little'):032x}"
    changes = [_change(cursor) for _ in range(count)]
    return Commit(name, txid, parent, source, step, raw, lsn, time, previous, meta, ranks, row, changes)


def _entries(cursor: Cursor, count: int) -> dict[int, Commit]:
    found = []
    for _ in range(count):
        lsn, time, length = cursor.unpack("<QQI4x")
        found.append(_commit(Cursor(cursor.take(length)), lsn, time))
        cursor.align()
    return {commit.txid: commit for commit in found}


class Catalog:
    """Commits by txid, the head, tags and values; every record changes it."""

    def __init__(self, report: Report) -> None:
        self.report, self.complete, self.head = report, False, 0
        self.commits: dict[int, Commit] = {}
        self.tags: dict[str, int] = {}
        self.values: dict[str, bytes] = {}

    def apply(self, head: RecordHeader, payload: bytes) -> None:
        """Apply a record; Damage when it is malformed."""
        if (head.type == SNAPSHOT) == self.complete:
            raise Damage("a SNAPSHOT is the first record and only that")
        cursor = Cursor(payload)
        if head.type == SNAPSHOT:
            self._snapshot(cursor)
        elif head.type == COMMIT:
            commit = _commit(cursor, head.lsn, head.time)
            if commit.txid <= self.head:
                raise Damage(f"txid {commit.txid} is not larger than the one before")
            if self.head in self.commits and commit.previous != self.commits[self.head].id:
                self.report.problems.append(f"commit {commit.txid}: does not name {self.head} as the commit before")
            self.head, self.commits[commit.txid] = commit.txid, commit
            for change in commit.changes:
                self._set(*change)
        elif head.type == CHANGE:
            self._set(*_change(cursor))
        elif head.type == TAG:
            before, after, length = cursor.unpack("<QQI4x")
            if self.tags.pop(name := cursor.text(length), 0) != before:
                self.report.problems.append(f"LSN {head.lsn}: tag {name!r} was not at {before}")
            self.tags |= {name: after} if after else {}
        elif head.type == COLLECT:
            for txid in _entries(cursor, cursor.unpack("<I4x")[0]):
                self.commits.pop(txid, None)
        elif not head.flags & 0x80:
            raise Refused(f"LSN {head.lsn}: a record of the unknown type {head.type}: a later release is needed")

    def _set(self, key: str, before: bytes | None, after: bytes | None) -> None:
        if self.values.pop(key, None) != before:
            self.report.problems.append(f"value {key!r}: is not what a CHANGE says it was before")
        self.values |= {key: after} if after is not None else {}

    def _snapshot(self, cursor: Cursor) -> None:
        _, self.head, commits, tags, values = cursor.unpack("<QQIII4x")
        self.commits = _entries(cursor, commits)
        for _ in range(tags):
            txid, length = cursor.unpack("<QI4x")
            self.tags[cursor.text(length)] = txid
            cursor.align()
        for _ in range(values):
            key_length, length = cursor.unpack("<II")
            key = cursor.text(key_length)
            self.values[key] = cursor.take(length)
            cursor.align()
        self.complete = True

    def line(self) -> list[Commit]:
        """The commits that the head's state continues, newest first; a collected one is stepped over."""
        order, found, txid = sorted(self.commits), list[Commit](), self.head
        while place := bisect_right(order, txid):
            found.append(self.commits[order[place - 1]])
            txid = min(found[-1].parent, found[-1].txid - 1)
        return found

    def select(self, commit: str | int | None, step: int | None, tag: str | None) -> list[Commit]:
        """The commit that is asked for, or when none is, the head's line, newest first."""
        line = self.line()
        left = self.commits.keys() - {c.txid for c in line}
        every, found = line + [self.commits[txid] for txid in sorted(left, reverse=True)], line
        if commit is not None:
            name = str(commit).lower()
            found = [c for c in every if str(c.txid) == name] or [c for c in every if c.id.startswith(name)]
            if len(found) > 1:
                raise Refused(f"commit {commit}: {len(found)} commits begin so")
        elif tag is not None:
            found = [c for c in every if tag in c.tags]
        elif step is not None:
            found = [c for c in every if c.step == step][:1]
        if not found:
            raise Refused("no such commit" if every else "the store has no commit")
        return found


def open_catalog(store: Path, report: Report) -> Catalog:
    """What the newest complete journal says, up to its end or its first damage."""
    identity, base = read_super(store, report)
    for journal in journals(store, identity, report):
        catalog, lsn = Catalog(report), 0
        try:
            for head, payload in journal.records(report):
                lsn = head.lsn
                catalog.apply(head, payload)
        except ValueError as damage:
            report.problems.append(f"journal {journal.name}: corrupt from LSN {lsn}: {damage}")
        if catalog.complete:
            if journal.place < base:
                report.problems.append(
                    f"wal: nothing complete at or above SUPER's base; the older {journal.name} is taken"
                )
            for tag, txid in sorted(catalog.tags.items()):
                if txid in catalog.commits:
                    catalog.commits[txid].tags.append(tag)
            return catalog
        report.notes.append(f"journal {journal.name}: incomplete, passed over")
    if identity is None or base != (0, 0):
        raise Damage("wal: no complete journal")
    return Catalog(report)  # a store whose creation was interrupted
