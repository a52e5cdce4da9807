"""A minimal store writer, from docs/FORMAT.md alone: it makes what the tests of tierload.rescue read.

It shares no code with the reader nor with the engine, and it takes no care of durability.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import xxhash
import zstandard

RAW, CONST, LZ4, ZSTD = range(4)
DTYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7 bits8 bits16 bits1x8 bits2x4 bits4x2"
)
SHELLS = frozenset(DTYPES.split()[22:])
NUMBERS = {name: number for number, name in enumerate(DTYPES.split(), 1)}
STORE_ID = bytes(range(16))
ABSENT = 0xFFFFFFFF
NIBBLES = [0]
for _power in (0x105EC76F, 0x20BD8EDE, 0x417B1DBC, 0x82F63B78):  # of the nibbles 1, 2, 4, 8
    NIBBLES += [_power ^ value for value in NIBBLES]


def crc(data: bytes, seed: int = 0) -> int:
    """CRC32C, a nibble at a time."""
    value = seed ^ 0xFFFFFFFF
    for byte in data:
        value = value >> 4 ^ NIBBLES[(value ^ byte) & 15]
        value = value >> 4 ^ NIBBLES[(value ^ byte >> 4) & 15]
    return value ^ 0xFFFFFFFF


def leaves(data: bytes, leaf: int) -> bytes:
    parts = [data[at : at + leaf] for at in range(0, len(data), leaf)]
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(part)) for part in parts)


def digest(value: int) -> bytes:
    return struct.pack("<QQ", value & (1 << 64) - 1, value >> 64)


def tree(data: bytes, leaf: int) -> bytes:
    return digest(xxhash.xxh3_128_intdigest(leaves(data, leaf) + struct.pack("<Q", len(data))))


def padded(data: bytes, unit: int = 8) -> bytes:
    return data + bytes(-len(data) % unit)


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def planes(raw: bytes, item: int, kinds: list[int], rotate: bool = False) -> bytes:
    """A page in codec 1, one kind a plane."""
    values = [int.from_bytes(raw[at : at + item], "little") for at in range(0, len(raw), item)]
    if rotate:
        shift = 8 * item - 16
        low = (1 << shift) - 1
        values = [(v & low) | (((v >> shift) << 1 | v >> (shift + 15)) & 0xFFFF) << shift for v in values]
    table, lengths, body = b"", b"", b""
    for number, kind in enumerate(kinds):
        plane = bytes(v >> (8 * number) & 255 for v in values)
        frames: list[bytes] = []
        if kind == CONST:
            assert len(set(plane)) == 1
            stored = b""
        elif kind == RAW:
            stored = plane
        else:
            cut = [plane[at : at + (128 << 10)] for at in range(0, len(plane), 128 << 10)]
            pack = (
                zstandard.ZstdCompressor().compress
                if kind == ZSTD
                else lambda b: lz4.block.compress(b, store_size=False)
            )
            frames = [pack(piece) for piece in cut]
            stored = b"".join(frames)
        table += struct.pack("<BBHI", kind, plane[0] if kind == CONST else 0, len(frames), len(stored))
        lengths += b"".join(struct.pack("<I", len(frame)) for frame in frames)
        body += stored
    return struct.pack("<BBH", item, int(rotate), 0) + table + lengths + body


@dataclass
class Chunk:
    """A chunk to be stored; `kinds` makes its pages planes; `pack` names the page that it shares. `part` says which
    tensor it is a part of: key, shape, and the offsets in it."""

    dtype: str
    sizes: tuple[int, ...]
    data: bytes
    kinds: list[int] | None = None
    rotate: bool = False
    pack: str = ""
    part: tuple[str, tuple[int, ...], tuple[int, ...]] | None = None


def array(values: np.ndarray[Any, Any], **more: Any) -> Chunk:
    return Chunk(values.dtype.name, values.shape, values.tobytes(), **more)


@dataclass
class Segment:
    """Pages back to back, each from a 4 KiB boundary on."""

    epoch: int
    txid: int
    rank: int = 0
    data: bytearray = field(default_factory=bytearray)

    @property
    def path(self) -> str:
        return f"seg/{self.epoch:08x}-{self.txid:012x}.r{self.rank:04x}.0000"

    def add(self, stored: bytes) -> int:
        at = len(self.data)
        self.data += padded(stored, 4096)
        return at


class Builder:
    """Writes a store of one epoch and one journal, which may be ended and continued by another."""

    def __init__(self, root: Path, epoch: int = 1, page_size: int = 64 << 10) -> None:
        self.root, self.epoch, self.page_size = root, epoch, page_size
        for folder in ("wal", "man", "seg"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "LOCK").touch()
        self.txid, self.lsn, self.time = 0, 1, 1_700_000_000_000_000_000
        self.entries: dict[int, tuple[int, int, bytes]] = {}  # txid: LSN, time, COMMIT payload
        self.head = 0
        self.tags: dict[str, int] = {}
        self.values: dict[str, bytes] = {}
        self.pages: dict[bytes, tuple[Any, ...]] = {}  # raw digest: a page that exists
        self.place: dict[tuple[str, int], tuple[str, int]] = {}  # (key, page of it): file, offset
        self.tamper: Callable[[bytearray], None] | None = None  # what a hostile writer does to a manifest
        self.rank, self.ranks = 0, 1  # whose shard is written
        self.previous = (0, 0, 0, 0)
        self.super(1, (0, 0))
        self.journal(0)
        self.super(2, (epoch, 0))

    # -- SUPER and the journal

    def super(self, generation: int, base: tuple[int, int], **change: Any) -> None:
        fields = {"version": 1, "features": 0, "release": b"0.1.0"} | change
        head = struct.pack("<8sIIQQ16s", b"TLSUPER1", fields["version"], 0, 0, fields["features"], STORE_ID)
        head += struct.pack("<QQQQ16s", generation, self.epoch, *base, fields["release"])
        slot = head.ljust(4092, b"\0")
        slot += struct.pack("<I", crc(slot))
        path = self.root / "SUPER"
        data = bytearray(path.read_bytes() if path.exists() else bytes(8192))
        at = 4096 * (generation & 1)
        data[at : at + 4096] = slot
        path.write_bytes(data)

    def journal(self, sequence: int, epoch: int | None = None) -> None:
        """Begin a journal pair with a SNAPSHOT of the catalog."""
        self.epoch, self.sequence = epoch or self.epoch, sequence
        self.salt = struct.pack("<Q", 0x5EED0000 + self.epoch * 256 + sequence)
        head = struct.pack("<8sIIQQ16s", b"TLWAL001", 1, 0, 0, 0, STORE_ID)
        head += struct.pack("<QQ", self.epoch, sequence) + self.salt + struct.pack("<Q", self.lsn)
        head += struct.pack("<QQQI", *self.previous)
        head = head.ljust(4092, b"\0")
        self.bytes = bytearray(head + struct.pack("<I", crc(head)))
        self.chain = self.previous[3]
        self.watermark = self.lsn - 1
        self.where: dict[int, tuple[int, int]] = {}  # LSN: offset, end
        payload = struct.pack(
            "<QQIIII", self.txid + 1, self.head, len(self.entries), len(self.tags), len(self.values), 0
        )
        payload += b"".join(map(self.entry, sorted(self.entries)))
        for name in sorted(self.tags, key=encode):
            payload += padded(struct.pack("<QII", self.tags[name], len(encode(name)), 0) + encode(name))
        for key in sorted(self.values, key=encode):
            value = self.values[key]
            payload += padded(struct.pack("<II", len(encode(key)), len(value)) + encode(key) + value)
        self.record(1, payload)

    def paths(self) -> tuple[Path, Path]:
        name = f"{self.epoch:08x}-{self.sequence:08x}"
        return self.root / "wal" / f"c-{name}", self.root / "wal" / f"m-{name}"

    def record(self, kind: int, payload: bytes, txid: int = 0, last: bool = True, flags: int = 0) -> int:
        """Append a record to both copies; returns its LSN."""
        self.time += 1
        head = struct.pack("<HBBQQQ", 64, kind, flags | last, self.lsn, txid, self.epoch)
        head += struct.pack("<IIIIQQ", len(payload), crc(payload), self.chain, 0, self.watermark, self.time)
        self.chain = crc(head, crc(self.salt))
        at = len(self.bytes)
        self.bytes += struct.pack("<I", self.chain) + head + padded(payload)
        self.where[self.lsn] = at, len(self.bytes)
        if last:
            self.bytes += bytes(-len(self.bytes) % 4096)
            self.watermark = self.lsn
        self.lsn += 1
        for path in self.paths():
            path.write_bytes(bytes(self.bytes) + bytes(16384))
        return self.lsn - 1

    def roll(self, epoch: int | None = None) -> None:
        """Close the journal and continue in a new one: of the same epoch, or as another opening would."""
        self.previous = (self.epoch, self.sequence, self.lsn - 1, self.chain)
        self.journal(0 if epoch else self.sequence + 1, epoch)

    def entry(self, txid: int) -> bytes:
        lsn, time, payload = self.entries[txid]
        return padded(struct.pack("<QQII", lsn, time, len(payload), 0) + payload)

    # -- what the journal says

    def tag(self, name: str, txid: int, last: bool = True) -> int:
        lsn = self.record(
            4, struct.pack("<QQII", self.tags.get(name, 0), txid, len(encode(name)), 0) + encode(name), last=last
        )
        self.tags.pop(name, None)
        if txid:
            self.tags[name] = txid
        return lsn

    def change(self, key: str, after: bytes | None) -> bytes:
        """A CHANGE payload, applied here."""
        before = self.values.pop(key, None)
        sizes = [ABSENT if v is None else len(v) for v in (before, after)]
        sums = [0 if v is None else xxhash.xxh3_64_intdigest(v) for v in (before, after)]
        if after is not None:
            self.values[key] = after
        op = 2 if after is None else 1
        head = struct.pack("<B3xIIIQQ", op, len(encode(key)), *sizes, *sums)
        return padded(head + encode(key) + (before or b"") + (after or b""))

    def collect(self, *txids: int) -> int:
        payload = struct.pack("<II", len(txids), 0) + b"".join(map(self.entry, txids))
        for txid in txids:
            del self.entries[txid]
        return self.record(5, payload)

    def commit(
        self,
        chunks: dict[str, Chunk],
        root: Any,
        step: int | None = None,
        meta: Any = None,
        changes: dict[str, bytes | None] | None = None,
        parent: int | None = None,
        document: str | None = None,
        last: bool = True,
    ) -> int:
        """Write a commit of one rank; returns its txid. In `root`, a leaf names its chunk by the chunk's key."""
        self.txid += 1
        row = self.manifest(chunks, root, document)
        return self._commit(row, step, meta, changes, parent, 0, sum(len(c.data) for c in chunks.values()), last)

    def commit_ranks(
        self, *shards: tuple[dict[str, Chunk], Any], rows: Callable[[list[bytes]], None] | None = None
    ) -> int:
        """Write a commit of several ranks, given the chunks and the document of each; `rows` changes the root's."""
        self.txid += 1
        self.ranks = len(shards)
        found = []
        for self.rank, (chunks, document) in enumerate(shards):
            found.append(self.manifest(chunks, None, json.dumps({"version": 1} | document)))
        if rows is not None:
            rows(found)
        length = 64 + 64 * self.ranks
        body = struct.pack("<8sIIQQQQQQ", b"TLROOT01", 1, self.ranks, self.epoch, self.txid, length, 0, 0, 0)
        body += b"".join(found)
        self.sealed(f"man/{self.epoch:08x}-{self.txid:012x}.root", body)
        row = struct.pack("<IIQQQ16sQQ", 0, 0, self.epoch, self.txid, len(body), tree(body, 64 << 10), 0, 0)
        size = sum(len(chunk.data) for chunks, _ in shards for chunk in chunks.values())
        txid = self._commit(row, None, None, None, None, 0, size, True)
        self.rank, self.ranks = 0, 1
        return txid

    def sealed(self, name: str, body: bytes) -> None:
        """Write a sealed file and its mirror."""
        for path in (name, name + ".m"):
            (self.root / path).write_bytes(body + leaves(body, 64 << 10))

    def rollback(self, source: int) -> int:
        """A commit whose root is that of an older one."""
        self.txid += 1
        return self._commit(self.entries[source][2][80:144], None, None, None, source, source, 0, True)

    def _commit(
        self,
        row: bytes,
        step: int | None,
        meta: Any,
        changes: dict[str, bytes | None] | None,
        parent: int | None,
        source: int,
        size: int,
        last: bool,
    ) -> int:
        before = digest(xxhash.xxh3_128_intdigest(self.entries[self.head][2])) if self.head else bytes(16)
        text = json.dumps(meta or {"metrics": {"d": {}}, "note": ""}).encode()
        flags = (step is not None) | 2 * bool(source)
        payload = struct.pack(
            "<QQQqII", self.txid, self.head if parent is None else parent, source, step or 0, flags, self.ranks
        )
        payload += before + struct.pack("<QQII", size, size, len(text), len(changes or {})) + row + padded(text)
        for key, value in (changes or {}).items():
            payload += self.change(key, value)
        lsn = self.record(2, payload, self.txid, last)
        self.entries[self.txid] = lsn, self.time, payload
        self.head = self.txid
        return self.txid

    # -- pages and manifests

    def page(self, segment: Segment, raw: bytes, chunk: Chunk, item: int) -> tuple[Any, ...]:
        """A row of pages, written into the segment unless such a page exists."""
        name = tree(raw, 16 << 10)
        if name not in self.pages:
            stored = raw if chunk.kinds is None else planes(raw, item, chunk.kinds, chunk.rotate)
            at = segment.add(stored)
            codec = int(chunk.kinds is not None)
            self.pages[name] = (segment, at, tree(stored, 16 << 10), len(stored), len(raw), codec, item if codec else 1)
        return name, *self.pages[name]

    def manifest(self, chunks: dict[str, Chunk], root: Any, document: str | None = None) -> bytes:
        """Write the segment and the manifest with its mirror; returns the root row."""
        segment = Segment(self.epoch, self.txid, self.rank)
        parts = {key: chunk.part or (key, (), ()) for key, chunk in chunks.items()}
        keys = sorted(chunks, key=lambda key: (encode(parts[key][0]), parts[key][2]))
        pages: list[tuple[Any, ...]] = []
        rows: list[tuple[Any, ...]] = []
        dims: list[int] = []
        packs: dict[str, int] = {}
        for key in keys:
            chunk = chunks[key]
            count = int(np.prod(chunk.sizes, dtype=np.int64))
            item = len(chunk.kinds) if chunk.kinds else max(1, len(chunk.data) // count if count else 1)
            first, offset = len(pages), 0
            if chunk.pack:
                members = [chunks[k] for k in keys if chunks[k].pack == chunk.pack]
                if chunk.pack not in packs:
                    packs[chunk.pack] = first
                    pages.append(self.page(segment, b"".join(c.data for c in members), chunk, item))
                first = packs[chunk.pack]
                offset = sum(len(c.data) for c in members[: members.index(chunk)])
                number = 1
            else:
                cut = [chunk.data[at : at + self.page_size] for at in range(0, len(chunk.data), self.page_size)]
                pages += [self.page(segment, raw, chunk, item) for raw in cut]
                number = len(cut)
            for at in range(number):
                where = pages[first + at]
                self.place[key, at] = where[1].path, where[2]
            rows.append((key, chunk, len(dims), first, number, offset))
            _, shape, offsets = chunk.part or ("", chunk.sizes, (0,) * len(chunk.sizes))
            dims += [*shape, *offsets, *chunk.sizes]
        segments = list({id(page[1]): page[1] for page in pages}.values())
        for each in segments:
            if each is segment:
                (self.root / each.path).write_bytes(each.data)
        sections = [b"".join(struct.pack("<QQIIQ", s.epoch, s.txid, s.rank, 0, len(s.data)) for s in segments)]
        table = b""
        packed = set(packs.values())
        for number, (raw, owner, at, stored, stored_length, raw_length, codec, item) in enumerate(pages):
            place = next(n for n, s in enumerate(segments) if s is owner)
            table += (
                raw
                + stored
                + struct.pack("<QIIIBBHII", at, place, stored_length, raw_length, codec, item, 0, number in packed, 0)
            )
        sections.append(table)
        text, table, hashes = b"", b"", []
        for name, chunk, dim, first, number, offset in rows:
            key = chunk.part[0] if chunk.part else name
            hashes.append(xxhash.xxh3_64_intdigest(encode(key)))
            table += struct.pack(
                "<QQIHBB",
                hashes[-1],
                len(text),
                len(encode(key)),
                NUMBERS[chunk.dtype],
                len(chunk.sizes),
                bool(chunk.pack),
            )
            table += struct.pack("<QQIIIIQ", dim, len(chunk.data), first, number, offset, 0, 0)
            text += encode(key)
        order = sorted(range(len(hashes)), key=hashes.__getitem__)
        sections += [table, struct.pack(f"<{len(order)}I", *order), struct.pack(f"<{len(dims)}q", *dims), text]
        numbers = {key: number for number, key in enumerate(keys)}
        sections.append((document or json.dumps({"version": 1, "root": resolve(root, numbers)})).encode())
        body, places = bytearray(256), b""
        for section in sections:
            body += bytes(-len(body) % 64)
            places += struct.pack("<QQ", len(body), len(section))
            body += section
        head = struct.pack("<8sIIIIQQ", b"TLMAN001", 1, self.rank, self.ranks, self.page_size, 0, 0)
        head += struct.pack("<QQQ", self.epoch, self.txid, len(body)) + places
        body[: len(head)] = head
        if self.tamper is not None:
            self.tamper(body)
        self.sealed(f"man/{self.epoch:08x}-{self.txid:012x}.r{self.rank:04x}", bytes(body))
        name = self.rank, 0, self.epoch, self.txid
        return struct.pack("<IIQQQ16sQQ", *name, len(body), tree(bytes(body), 64 << 10), 0, 0)


def resolve(value: Any, numbers: dict[str, int]) -> Any:
    """The document with the chunks' numbers in place of their keys."""
    if isinstance(value, list):
        return [resolve(inner, numbers) for inner in value]
    if isinstance(value, dict):
        found = {name: resolve(inner, numbers) for name, inner in value.items()}
        if isinstance(value.get("chunk"), str):
            found["chunk"] = numbers[value["chunk"]]
        return found
    return value


def tensor(chunk: str, shape: tuple[int, ...] | list[int], **more: Any) -> Any:
    """A `t` leaf."""
    return {"t": {"chunk": chunk, "shape": list(shape), **more}}
