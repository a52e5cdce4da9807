"""Rescue reader: turns one commit of a tierload store into a safetensors file.

Written from docs/FORMAT.md alone and on purpose independent of the engine: it imports nothing of
tierload and no torch, and runs as a copied file (`python rescue.py STORE --to OUT.safetensors`) as
well as by `python -m tierload.rescue`. It only reads. It distrusts what it reads: offsets, lengths
and counts are checked against the file that holds them before anything is allocated.

Exit codes: 0 fine; 1 something damaged was skipped (each is named on stderr); 2 usage, or no store.
"""

from __future__ import annotations

import argparse
import binascii
import functools
import json
import math
import os
import re
import stat
import struct
import sys
from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import safetensors
import xxhash
import zstandard

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype name, shape, row-major bytes
BLOCK, PAGE_LEAF, MANIFEST_LEAF, FRAME = 4096, 16 << 10, 64 << 10, 128 << 10
MAX_PAGE, MAX_PAYLOAD = 1 << 20, 64 << 20
SPARE = 1 << 30  # bytes that the tensors of a manifest may take together, beyond 16 times its pages
_DTYPES = """bool:1 uint8:1 int8:1 uint16:2 int16:2 uint32:4 int32:4 uint64:8 int64:8 float16:2 bfloat16:2 float32:4
float64:8 complex32:4 complex64:8 complex128:16 float8_e4m3fn:1 float8_e4m3fnuz:1 float8_e5m2:1 float8_e5m2fnuz:1
float8_e8m0fnu:1 float4_e2m1fn_x2:1"""
SIZES = {name: int(size) for name, size in (pair.split(":") for pair in _DTYPES.split())}  # in order: number 1 is first
_CRC_TABLE = [0]
for _power in (0xF26B8303, 0xE13B70F7, 0xC79A971F, 0x8AD958CF, 0x105EC76F, 0x20BD8EDE, 0x417B1DBC, 0x82F63B78):
    _CRC_TABLE += [_power ^ value for value in _CRC_TABLE]


class Damage(ValueError):
    """Bytes that are not what the format says."""


class Refused(Exception):
    """No store, no such commit, or a store that a reader of format 1 must not read."""


@dataclass
class Report:
    """What was found on the way: `problems` cost data or may have, `notes` did not."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, asked: Report | None) -> None:
        """Raise what was found when the caller did not ask for a report of it."""
        if asked is None and self.problems:
            raise Damage("\n".join(self.problems))


Shard = namedtuple("Shard", ["rank", "epoch", "txid", "length", "digest"])  # a root row: which manifest a rank has
_Header = namedtuple("_Header", ["crc", "type", "flags", "lsn", "length", "payload_crc", "chain", "watermark", "time"])


@dataclass
class Commit:
    """A commit of the catalog; `meta` is the JSON text, `tags` are the names that point here."""

    id: str
    txid: int
    parent: int
    source: int
    step: int | None
    raw_bytes: int
    lsn: int
    time: int
    meta: str
    shards: list[Shard]
    tags: list[str] = field(default_factory=list)


@functools.lru_cache(maxsize=2)  # both copies of a journal hold the same
def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC32C of `data`, continued from `seed`; `crc32c(b"123456789") == 0xE3069283`."""
    register, table = seed ^ 0xFFFFFFFF, _CRC_TABLE
    for byte in data:
        register = table[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


def _leaves(data: bytes, leaf: int) -> bytes:
    parts = (data[at : at + leaf] for at in range(0, len(data), leaf))
    return b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts)


def _root(leaves: bytes, length: int) -> bytes:
    return xxhash.xxh3_128_intdigest(leaves + length.to_bytes(8, "little")).to_bytes(16, "little")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _read(path: Path, offset: int, length: int) -> bytes:
    """These bytes of a regular file; none when they are not all there and readable. The file bounds the allocation."""
    try:
        if 0 < length <= _size(path) - offset:
            with path.open("rb", buffering=0) as file:  # a buffer would read ahead, perhaps into a bad sector
                file.seek(offset)
                data = file.read(length)
            return data if len(data) == length else b""
    except OSError:
        pass
    return b""


class _Cursor:
    """Takes fields off a payload, never beyond its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise Damage(f"a field of {length} bytes at {self.at} goes beyond the {len(self.data)} that are there")
        self.at += length
        return self.data[self.at - length : self.at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def text(self, length: int) -> str:
        return self.take(length).decode("utf-8", "surrogatepass")  # what is no UTF-8 is a ValueError, as Damage is

    def align(self) -> None:
        self.at += -self.at % 8


def _super(store: Path, report: Report) -> tuple[bytes | None, tuple[int, int]]:
    """Store id (None: not known) and base of the valid slot with the larger generation."""
    valid = []
    for number in (0, 1):
        slot = _read(store / "SUPER", number * BLOCK, BLOCK)
        if slot[:8] == b"TLSUPER1" and crc32c(slot[:-4]).to_bytes(4, "little") == slot[-4:] and slot[48] & 1 == number:
            valid.append(struct.unpack_from("<8xI12xQ16sQ8xQQ16s", slot))
    if not valid and not (store / "wal").is_dir():
        raise Refused(f"{store}: no tierload store")
    if not valid:
        report.problems.append("SUPER: both slots are damaged; the newest journal in wal/ is taken")
        return None, (0, 0)
    version, features, identity, _, epoch, sequence, release = max(valid, key=lambda slot: slot[3])
    if version != 1 or features:
        least = release.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise Refused(f"{store}: format {version}, features {features:#x}: tierload {least} or later is needed")
    return identity, (epoch, sequence)


def _header(path: Path, offset: int, seed: int, epoch: int) -> _Header | None:
    """The valid record header of this journal at an offset."""
    if data := _read(path, offset, 64):
        head, (size, own) = _Header._make(struct.unpack("<I2xBBQ16xIII4xQQ", data)), struct.unpack("<4xH18xQ32x", data)
        if (size, own, head.crc) == (64, epoch, crc32c(data[4:], seed)) and head.length <= MAX_PAYLOAD:
            return head
    return None


def _records(name: str, copies: list[Path], start: bytes, report: Report) -> Iterator[tuple[_Header, bytes]]:
    """The records of a journal, each from whichever copy holds it; then a verdict on what follows the last."""
    epoch, salt, lsn, chain = struct.unpack_from("<Q8x8sQ24xI", start, 48)
    seed, offset, lame = crc32c(salt), BLOCK, set[Path]()
    while True:
        good: dict[Path, tuple[_Header, bytes]] = {}
        for path in copies:
            if (head := _header(path, offset, seed, epoch)) and (head.lsn, head.chain) == (lsn, chain):
                payload = _read(path, offset + 64, head.length)
                if len(payload) == head.length and crc32c(payload) == head.payload_crc:
                    good[path] = head, payload
        if not good:
            break
        bad = {path for path in copies if path not in good}
        report.notes += [f"wal/{path.name}: LSN {lsn} at {offset} is in the other copy only" for path in bad - lame]
        lame |= bad
        head, payload = next(iter(good.values()))
        yield head, payload
        lsn, chain, offset = lsn + 1, head.crc, offset + 64 + -(-head.length // 8) * 8
        if head.flags & 1:
            offset += -offset % BLOCK
    for path in copies:
        for later in range(offset - offset % BLOCK + BLOCK, _size(path) - 63, BLOCK):
            if (head := _header(path, later, seed, epoch)) and head.watermark >= lsn:
                report.problems.append(f"{name}: corrupt from LSN {lsn} at {offset}: wal/{path.name} has later records")
                return


def _parse_change(cursor: _Cursor) -> tuple[str, list[bytes | None]]:
    """A CHANGE payload: the key, and the values before and after."""
    op, key_length, *rest = cursor.unpack("<B3xIIIQQ")
    key, values = cursor.text(key_length), list[bytes | None]()
    for length, digest in zip(rest[:2], rest[2:], strict=True):
        value = None if length == 0xFFFFFFFF else cursor.take(length)
        if digest != (0 if value is None else xxhash.xxh3_64_intdigest(value)):
            raise Damage(f"CHANGE of {key!r}: a value does not match its digest")
        values.append(value)
    cursor.align()
    if {1: False, 2: True}.get(op) != (values[1] is None):
        raise Damage(f"CHANGE of {key!r}: operation {op} does not fit its values")
    return key, values


class _Catalog:
    """Commits by txid, the head, tags and values; every record changes it."""

    def __init__(self, report: Report) -> None:
        self.report, self.complete, self.head = report, False, 0
        self.commits: dict[int, Commit] = {}
        self.tags: dict[str, int] = {}
        self.values: dict[str, bytes] = {}

    def apply(self, head: _Header, cursor: _Cursor) -> None:
        """Apply a record; Damage when it is malformed."""
        if (head.type == 1) == self.complete:
            raise Damage("a SNAPSHOT is the first record and only that")
        if head.type == 1:
            self.snapshot(cursor)
        elif head.type == 2:
            commit, before, changes = self.parse(cursor, head.lsn, head.time)
            if commit.txid <= max(self.commits, default=0):
                raise Damage(f"txid {commit.txid} is not larger than those before")
            if self.head in self.commits and f"{int.from_bytes(before, 'little'):032x}" != self.commits[self.head].id:
                self.report.problems.append(f"commit {commit.txid}: does not name {self.head} as the commit before")
            self.head, self.commits[commit.txid] = commit.txid, commit
            for change in changes:
                self.change(*change)
        elif head.type == 3:
            self.change(*_parse_change(cursor))
        elif head.type == 4:
            before, after, length = cursor.unpack("<QQI4x")
            if self.tags.pop(name := cursor.text(length), 0) != before:
                self.report.problems.append(f"LSN {head.lsn}: tag {name!r} was not at {before}")
            self.tags |= {name: after} if after else {}
        elif head.type == 5:
            for commit in self.entries(cursor, cursor.unpack("<I4x")[0]):
                self.commits.pop(commit.txid, None)
        elif head.type not in (6, 7) and not head.flags & 0x80:
            raise Refused(f"LSN {head.lsn}: a record of the unknown type {head.type}: a later release is needed")

    def parse(self, cursor: _Cursor, lsn: int, time: int) -> tuple[Commit, bytes, list[tuple[str, list[bytes | None]]]]:
        """A COMMIT payload: the commit, the stored id of the one before, the changes."""
        txid, parent, source, step, flags, ranks, before, raw, _, length, count = cursor.unpack("<QQQqII16sQQII")
        shards = [Shard(*cursor.unpack("<I4xQQQ16s16x")) for _ in range(ranks)]
        meta, name = cursor.text(length), f"{xxhash.xxh3_128_intdigest(cursor.data):032x}"
        cursor.align()
        commit = Commit(name, txid, parent, source, step if flags & 1 else None, raw, lsn, time, meta, shards)
        return commit, before, [_parse_change(cursor) for _ in range(count)]

    def change(self, key: str, values: list[bytes | None]) -> None:
        if self.values.pop(key, None) != values[0]:
            self.report.problems.append(f"value {key!r}: is not what a CHANGE says it was before")
        self.values |= {key: values[1]} if values[1] is not None else {}

    def entries(self, cursor: _Cursor, count: int) -> list[Commit]:
        found = []
        for _ in range(count):
            lsn, time, length = cursor.unpack("<QQI4x")
            found.append(self.parse(_Cursor(cursor.take(length)), lsn, time)[0])
            cursor.align()
        return found

    def snapshot(self, cursor: _Cursor) -> None:
        _, self.head, commits, tags, values = cursor.unpack("<QQIII4x")
        self.commits = {commit.txid: commit for commit in self.entries(cursor, commits)}
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


def _catalog(store: Path, report: Report) -> _Catalog:
    """What the newest complete journal says, up to its end or its first damage."""
    identity, base = _super(store, report)
    wal = store / "wal"
    names = os.listdir(wal) if wal.is_dir() else []
    for name in sorted({n[2:] for n in names if re.fullmatch("[cm]-[0-9a-f]{8}-[0-9a-f]{8}", n)}, reverse=True):
        place, copies = (int(name[:8], 16), int(name[9:], 16)), [wal / f"c-{name}", wal / f"m-{name}"]
        for start in dict.fromkeys(_read(path, 0, BLOCK) for path in copies):
            if start[:8] != b"TLWAL001" or crc32c(start[:-4]).to_bytes(4, "little") != start[-4:]:
                continue
            version, features, owner, *where = struct.unpack_from("<8xI12xQ16sQQ", start)
            if where != [*place] or identity not in (None, owner):
                continue
            if version != 1 or features:
                raise Refused(f"journal {name}: format {version}, features {features:#x}: a later release is needed")
            catalog, lsn = _Catalog(report), 0
            try:
                for head, payload in _records(f"journal {name}", copies, start, report):
                    lsn = head.lsn
                    catalog.apply(head, _Cursor(payload))
            except ValueError as damage:
                report.problems.append(f"journal {name}: corrupt from LSN {lsn}: {damage}")
            if catalog.complete:
                if place < base:
                    report.problems.append(f"wal: nothing complete at or above SUPER's base; the older {name} is taken")
                for tag, txid in sorted(catalog.tags.items()):
                    if txid in catalog.commits:
                        catalog.commits[txid].tags.append(tag)
                return catalog
        report.notes.append(f"journal {name}: incomplete, passed over")
    raise Damage("wal: no complete journal")


def _body(store: Path, shard: Shard, report: Report) -> bytes:
    """A manifest's body, each leaf of it from whichever copy holds it."""
    name, length = f"man/{shard.epoch:08x}-{shard.txid:012x}.r{shard.rank:04x}", shard.length
    paths = [path for path in (store / name, store / f"{name}.m") if _size(path) >= length]
    spans = [(at, min(MANIFEST_LEAF, length - at)) for at in range(0, length if paths else 0, MANIFEST_LEAF)]
    tables = [_read(path, length, 8 * len(spans)) for path in paths]  # should both be damaged, the bodies give it
    tables += [b"".join(_leaves(_read(path, *span), MANIFEST_LEAF) for span in spans) for path in paths]
    table = next((table for table in tables if _root(table, length) == shard.digest), b"")
    if not paths or not table:
        raise Damage(f"{name}: no copy of it is long enough and matches the commit's digest")
    body = []
    for number, span in enumerate(spans):
        leaves = [_read(path, *span) for path in paths]
        good = [leaf for leaf in leaves if leaf and _leaves(leaf, MANIFEST_LEAF) == table[8 * number : 8 * number + 8]]
        if not good:
            raise Damage(f"{name}: the leaf at {span[0]} is damaged in every copy")
        body.append(good[0])
    if len(set(tables)) > 1 or len(paths) < 2:
        report.notes.append(f"{name}: one of the copies is damaged or missing; the other one is used")
    return b"".join(body)


def _frame(kind: int, data: bytes, length: int) -> bytes:
    """One LZ4 block (kind 2) or zstd frame (kind 3) that holds exactly `length` bytes."""
    try:
        if kind == 2:
            raw: bytes = lz4.block.decompress(data, uncompressed_size=length)
        elif zstandard.get_frame_parameters(data).content_size != length:  # before the decoder allocates it
            raise Damage("a frame of another content size")
        else:
            raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=length, allow_extra_data=False)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise Damage(f"a frame does not decode ({error})") from None
    if len(raw) != length:
        raise Damage("a frame of another length")
    return raw


def _planes(stored: bytes, raw_length: int, item: int) -> bytes:
    """Decode codec 1: byte planes, each raw, constant or in compressed frames."""
    cursor = _Cursor(stored)
    size, transform = cursor.unpack("<BBxx")
    if size != item or size not in (1, 2, 4, 8) or raw_length % size or transform > (size > 1):
        raise Damage(f"planes of {size} bytes an item, transform {transform}")
    length = raw_length // size
    heads = [cursor.unpack("<BBHI") for _ in range(size)]
    frames = [cursor.unpack(f"<{count}I") for _, _, count, _ in heads]
    planes = np.empty((size, length), np.uint8)
    for plane, (kind, constant, count, plane_length), sizes in zip(planes, heads, frames, strict=True):
        expected = {0: (0, length), 1: (0, 0)}.get(kind, (-(-length // FRAME), sum(sizes)))
        if kind > 3 or (count, plane_length) != expected:
            raise Damage(f"a plane of kind {kind} with {count} frames and {plane_length} bytes")
        plane[:] = np.frombuffer(cursor.take(length), np.uint8) if kind == 0 else constant
        for number, frame in enumerate(sizes):
            part = plane[number * FRAME : (number + 1) * FRAME]
            part[:] = np.frombuffer(_frame(kind, cursor.take(frame), len(part)), np.uint8)
    if cursor.at != len(stored):
        raise Damage("bytes after the last plane")
    if transform:
        top = planes[-1].astype(np.uint16) << 8 | planes[-2]
        top = top >> 1 | top << 15
        planes[-1], planes[-2] = top >> 8, top & 255
    return planes.T.tobytes()


class _Manifest:
    """One rank's tables, and the way from a chunk to its bytes."""

    def __init__(self, store: Path, shard: Shard, report: Report) -> None:
        self.store, cursor = store, _Cursor(body := _body(store, shard, report))
        magic, version, rank, self.page_size, features, *place = cursor.unpack("<8sII4xI8xQQQQ")
        if magic != b"TLMAN001" or version != 1 or features:
            raise Damage(f"manifest of format {version}, features {features:#x}: not readable by this release")
        if (rank, *place) != shard[:4] or self.page_size > MAX_PAGE:
            raise Damage("manifest whose header does not fit its commit")
        sections = [cursor.unpack("<QQ") for _ in range(7)]
        if any(offset % 64 or offset + length > len(body) for offset, length in sections):
            raise Damage("manifest with a section that goes beyond it")
        self.sections = [body[offset : offset + length] for offset, length in sections]
        self.chunks, self.state = len(self.sections[2]) // 64, self.sections[6]
        self.budget = SPARE + 16 * self.page_size * (len(self.sections[1]) // 64)
        self.page = functools.lru_cache(maxsize=8)(self.decode_page)

    def row(self, section: int, layout: str, number: int) -> tuple[Any, ...]:
        cursor = _Cursor(self.sections[section])
        cursor.at = number * struct.calcsize(layout)
        return cursor.unpack(layout)

    def decode_page(self, number: int) -> bytes:
        raw_digest, digest, at, segment, length, size, codec, item = self.row(1, "<16s16sQIIIBB10x", number)
        name = "seg/{:08x}-{:012x}.r{:04x}.{:04x}".format(*self.row(0, "<QQIIQ", segment))
        try:
            if at % BLOCK or size > self.page_size or codec > 1:
                raise Damage(f"codec {codec}, raw length {size}")
            stored = _read(self.store / name, at, length)
            if len(stored) != length:
                raise Damage("the file is missing, too short, or not readable there")
            if _root(_leaves(stored, PAGE_LEAF), length) != digest:
                raise Damage("the stored bytes do not match their digest")
            raw = _planes(stored, size, item) if codec else stored
            if len(raw) != size or _root(_leaves(raw, PAGE_LEAF), size) != raw_digest:
                raise Damage("the raw bytes do not match their digest")
        except ValueError as damage:
            raise Damage(f"page {number}, {name}, offset {at}: {damage}") from None
        return raw

    def charge(self, size: int) -> None:
        """Bound what a small hostile manifest makes of its pages, by strides of 0 or by naming them again and again."""
        if size > self.budget:
            raise Damage("the tensors together are far larger than what is stored")
        self.budget -= size

    def key(self, number: int) -> str:
        digest, start, length = self.row(2, "<QQI44x", number)
        key = self.sections[5][start : start + length]
        if len(key) != length or xxhash.xxh3_64_intdigest(key) != digest:
            raise Damage(f"chunk {number}: its key is damaged")
        return _Cursor(key).text(length)

    def chunk(self, number: int) -> Tensor:
        """A chunk: dtype, sizes and bytes, every page of them checked."""
        code, ndim, dims, length, first, count, offset = self.row(2, "<20xHBxQQIII12x", number)
        shape = [self.row(4, "<q", dims + 2 * ndim + axis)[0] for axis in range(ndim)]
        dtype, size = [("", 0), *SIZES.items()][code if code <= len(SIZES) else 0]
        have = sum(self.row(1, "<48xI12x", page)[0] for page in range(first, first + count))
        fits = offset <= self.page_size and 0 <= have - offset - length <= self.page_size
        if not size or not fits or min(shape, default=0) < 0 or math.prod(shape) * size != length:
            raise Damage(f"chunk {number}: {length} bytes at {offset} of {have} for {dtype}{shape} (dtype {code})")
        self.charge(length)
        data = b"".join(map(self.page, range(first, first + count)))
        return dtype, tuple(shape), data[offset : offset + length]


_PAIRS = {"map", "odict", "counter", "ddict", "statedict", "named", "data", "folder"}
_LISTS = {"tuple", "set", "frozenset", "range", "slice", "deque"}
_MEMBER = {"ddict": "items", "statedict": "items", "deque": "items", "named": "fields", "data": "fields"}
_MEMBER |= {"folder": "entries", "object": "state", "rng": "state", "enum": "value"}
_TAGS = """text int float complex bytes bytearray npscalar size dtype device layout path date time datetime timedelta
ref pickle link"""
_PLAIN = {*_TAGS.split()}


def _element(value: Any) -> str:
    """A path element: text stands for itself, anything else is `#` and its Python literal."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        value = binascii.a2b_base64(value["text"]).decode("utf-8", "surrogatepass")
    if isinstance(value, str):
        return re.sub("^#", "~2", value.replace("~", "~0").replace("/", "~1")) or "~3"
    return "#" + _literal(value).replace("~", "~0").replace("/", "~1")


def _literal(value: Any) -> str:
    """The Python literal of a value of the document; its JSON text for what has none."""
    match value:
        case {"tuple": [*many]}:
            return f"({', '.join(map(_literal, many))}{',' * (len(many) == 1)})"
        case {"int": str(text)}:
            return repr(int(text, 16))
        case {"float": str(text)}:
            return text.partition(":")[0]
        case {"bytes": str(text)}:
            return repr(binascii.a2b_base64(text))
        case dict() | list():
            return json.dumps(value, separators=(",", ":"))
    return repr(value)


def _below(tag: str, content: Any) -> list[tuple[str, Any]]:
    """What a value of the document holds: path elements, each begun by `/`, and values; no element: the same path."""
    inner = content[_MEMBER[tag]] if tag in _MEMBER and "optimizer" not in content else content
    if tag == "d" or tag in _PAIRS:
        return [(f"/{_element(key)}", value) for key, value in (content.items() if tag == "d" else inner)]
    if tag == "list" or tag in _LISTS:
        return [(f"/#{number}", value) for number, value in enumerate(inner)]
    if tag == "object" and "optimizer" in content:
        names, optimizer = content["optimizer"]["names"], content["optimizer"]
        states = [(n if names[n] is None else names[n], value) for n, value in optimizer["state"]]
        below = [(f"/state/{_element(name)}", value) for name, value in states]
        return [*below, ("/param_groups", optimizer["groups"]), ("", optimizer["rest"])]
    if tag in _MEMBER:
        return [("", inner)]
    if tag in _PLAIN:
        return []
    raise Damage(f"unknown tag {tag!r}")


def _users(manifest: _Manifest, where: str, report: Report) -> list[list[tuple[str, str, dict[str, Any]]]]:
    """For each chunk the key, tag and content of everything in the document that has it."""
    users: list[list[tuple[str, str, dict[str, Any]]]] = [[] for _ in range(manifest.chunks)]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 6000))  # 500 values inside each other are some thousand brackets
    try:
        document = json.loads(_Cursor(manifest.state).text(len(manifest.state)))
        if document["version"] != 1:
            raise Damage(f"version {document['version']!r}")
        stack = [("", document["root"])]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        report.problems.append(f"{where}: the state document is not readable ({error}); chunks by their own keys")
        return users
    finally:
        sys.setrecursionlimit(limit)
    while stack:
        path, value = stack.pop()
        try:
            if isinstance(value, dict | list):
                content: Any
                ((tag, content),) = value.items() if isinstance(value, dict) else [("list", value)]
                if tag not in ("t", "blob", "ndarray", "file"):
                    stack += [(path + element, inner) for element, inner in reversed(_below(tag, content))]
                elif type(number := content["chunk"]) is int and 0 <= number < len(users):
                    users[number].append((path[1:], tag, content))
                elif number is not None:
                    raise Damage(f"names chunk {number!r} of {len(users)}")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            report.problems.append(f"{where}, key {path[1:]!r}: state document: {type(error).__name__} {error}")
    return users


def _view(leaf: dict[str, Any], chunk: Tensor, manifest: _Manifest) -> Tensor:
    """The tensor that a `t` describes, made contiguous, with conj and neg carried out."""
    dtype, shape, offset = str(leaf.get("dtype", chunk[0])), leaf["shape"], leaf.get("offset", 0)
    stride = leaf.get("stride", [math.prod(shape[at + 1 :]) for at in range(len(shape))])
    numbers = [*shape, *stride, offset]
    if dtype not in SIZES or len(stride) != len(shape) or any(type(n) is not int or n < 0 or n >> 63 for n in numbers):
        raise Damage(f"dtype {dtype}, shape {shape}, stride {stride}, offset {offset}")
    size, count, have = SIZES[dtype], math.prod(shape), len(chunk[2]) // SIZES[dtype]
    if not count:
        return dtype, tuple(shape), b""
    if offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) >= have:
        raise Damage(f"shape {shape}, stride {stride}, offset {offset} go beyond {have} elements")
    manifest.charge(count * size)
    steps = [step * size if n > 1 else 0 for n, step in zip(shape, stride, strict=True)]
    data = np.ndarray(shape, f"V{size}", chunk[2], offset * size, steps).tobytes()
    if leaf.get("conj") or leaf.get("neg"):
        whole = not dtype.startswith("complex")
        if "float8" in dtype or "float4" in dtype or dtype == "bool" or (whole and leaf.get("conj")):
            raise Damage(f"conj or neg of {dtype} has no meaning here")
        parts = np.frombuffer(data, f"<u{size if whole else size // 2}").copy()
        sign = parts.dtype.type(1 << (8 * parts.itemsize - 1))
        if leaf.get("conj"):
            parts[1::2] ^= sign
        if leaf.get("neg"):
            parts = np.negative(parts) if "int" in dtype else parts ^ sign
        data = parts.tobytes()
    return dtype, tuple(shape), data


def _tensors(manifest: _Manifest, where: str, report: Report) -> dict[str, Tensor]:
    """Every tensor of a manifest by its key; what is damaged is reported and left out."""
    found: dict[str, Tensor] = {}
    for number, users in enumerate(_users(manifest, where, report)):
        keys = sorted((key for key, _, _ in users), key=lambda key: key.encode("utf-8", "surrogatepass"))
        try:
            own = manifest.key(number)
            if keys and keys[0] != own:
                report.problems.append(f"{where}: chunk {number} is {own!r} in the manifest, {keys} in the document")
            keys = keys or [own]
            chunk = manifest.chunk(number)
        except ValueError as damage:
            report.problems += [f"{where}, key {key!r}: {damage}" for key in keys or [f"chunk {number}"]]
            continue
        flat = "uint8", (len(chunk[2]),), chunk[2]
        for key, tag, leaf in users or [(own, "", {})]:
            try:
                tensor = _view(leaf, chunk, manifest) if tag == "t" else flat if tag else chunk
                if found.setdefault(key, tensor) is not tensor:
                    raise Damage("a second tensor of this key")
            except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
                report.problems.append(f"{where}, key {key!r}: {type(error).__name__} {error}")
    return found


def _select(catalog: _Catalog, commit: str | int | None, step: int | None, tag: str | None) -> list[Commit]:
    """The wanted commit; all of them, newest first, when none was named."""
    every = found = [found for _, found in sorted(catalog.commits.items(), reverse=True)]
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


def _extract(store: Path, report: Report, which: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a commit, and everything else of it as text."""
    catalog = _catalog(store, report)
    for wanted in _select(catalog, **which):
        facts = {name: value for name, value in vars(wanted).items() if name not in ("meta", "shards")}
        values = {key: value.decode("utf-8", "backslashreplace") for key, value in catalog.values.items()}
        texts = {"tierload.commit": json.dumps(facts), "tierload.meta": wanted.meta}
        texts["tierload.values"] = json.dumps(values)
        tensors: dict[str, Tensor] = {}
        readable, many = not wanted.shards, len(wanted.shards) > 1
        for shard in wanted.shards:
            where = f"commit {wanted.txid} ({wanted.id}) rank {shard.rank}"
            try:
                manifest = _Manifest(store, shard, report)
            except ValueError as damage:
                report.problems.append(f"{where}: {damage}")
                continue
            readable = True
            texts["tierload.state" + f".rank{shard.rank}" * many] = manifest.state.decode("ascii", "backslashreplace")
            for key, tensor in _tensors(manifest, where, report).items():
                tensors[f"rank{shard.rank}/" * many + key] = tensor
        if readable:
            return tensors, texts
    raise Damage(report.problems.pop())


def read(
    store: str | os.PathLike[str],
    commit: str | int | None = None,
    step: int | None = None,
    tag: str | None = None,
    report: Report | None = None,
) -> dict[str, Tensor]:
    """Every tensor of a commit (the newest unless one is named) by its key: dtype name, shape, row-major bytes.

    `commit` is a txid, or the id or the beginning of it. What is damaged is left out and named in
    `report.problems`; without a report, damage raises `Damage`.
    """
    own = report or Report()
    tensors, _ = _extract(Path(store), own, {"commit": commit, "step": step, "tag": tag})
    own.check(report)
    return tensors


def commits(store: str | os.PathLike[str], report: Report | None = None) -> list[Commit]:
    """The commits of a store in the order of their txids; without a report, damage raises `Damage`."""
    own = report or Report()
    found = [commit for _, commit in sorted(_catalog(Path(store), own).commits.items())]
    own.check(report)
    return found


def _plain(text: str) -> str:
    """Text without lone surrogates, which no safetensors file holds; `~u` is free in the syntax of keys."""
    return re.sub("[\ud800-\udfff]", lambda match: f"~u{ord(match[0]):04x}", text)


def save(tensors: dict[str, Tensor], texts: dict[str, str], path: Path) -> list[str]:
    """Write a safetensors file, whole or not at all; returns a line for each tensor that it holds as raw bytes."""
    specs: dict[str, safetensors.TensorSpec] = {}
    raw: dict[str, dict[str, Any]] = {}
    for key, (dtype, shape, data) in tensors.items():
        name = "~__metadata__" if key == "__metadata__" else _plain(key)  # the one name that is not free
        if dtype.startswith("complex") or (dtype == "float4_e2m1fn_x2" and not shape):
            raw[name] = {"dtype": dtype, "shape": shape}
            dtype, shape = "uint8", (len(data),)
        pointer = np.frombuffer(data, np.uint8).ctypes.data if data else 0  # `tensors` keeps it alive
        specs[name] = safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=pointer, data_len=len(data))
    metadata = {name: _plain(text) for name, text in texts.items()} | {"tierload.raw": json.dumps(raw)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)  # 0666 & ~umask; safetensors replaces the file by one of 0600
        os.close(descriptor)
        safetensors.serialize_file(specs, temporary, metadata)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return [f"{name!r}: {entry['dtype']}{list(entry['shape'])} is held as raw uint8" for name, entry in raw.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
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
            tensors, texts = _extract(options.store, report, named)
            report.notes += save(tensors, texts | {"tierload.skipped": json.dumps(report.problems)}, options.to)
    except Damage as damage:
        report.problems.append(str(damage))
    except (Refused, OSError, safetensors.SafetensorError) as error:
        print(f"rescue: error: {error}", file=sys.stderr)
        return 2
    finally:
        for kind, lines in (("note", report.notes), ("damaged", report.problems)):
            for line in lines:
                print(f"rescue: {kind}: {_plain(line)}", file=sys.stderr)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
