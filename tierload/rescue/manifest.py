"""A commit's root and manifests, and through them the bytes of chunks: docs/FORMAT.md sections 6 and 7."""

import functools
import math
import struct
from pathlib import Path
from typing import Any

import xxhash

from .catalog import ROW, Commit, Row
from .digests import MANIFEST_LEAF, leaf_digests, page_digest, root_digest
from .files import BLOCK, Cursor, read_at, size_of
from .pages import decode_planes
from .report import Damage, Report

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype name, shape, row-major bytes
MAX_PAGE = 16 << 20
SPARE = 1 << 30  # bytes that the tensors of a manifest may take together, beyond 16 times its pages
_DTYPES = """bool:1 uint8:1 int8:1 uint16:2 int16:2 uint32:4 int32:4 uint64:8 int64:8 float16:2 bfloat16:2 float32:4
float64:8 complex32:4 complex64:8 complex128:16 float8_e4m3fn:1 float8_e4m3fnuz:1 float8_e5m2:1 float8_e5m2fnuz:1
float8_e8m0fnu:1 float4_e2m1fn_x2:1 int1:1 int2:1 int3:1 int4:1 int5:1 int6:1 int7:1 uint1:1 uint2:1 uint3:1 uint4:1
uint5:1 uint6:1 uint7:1 bits8:1 bits16:2 bits1x8:1 bits2x4:1 bits4x2:1"""
SIZES = {name: int(size) for name, size in (pair.split(":") for pair in _DTYPES.split())}  # in order: number 1 is first
SHELLS = frozenset([*SIZES][22:])  # torch's names for bytes, which no other format has
SEGMENTS, PAGES, CHUNKS, INDEX, DIMS, KEYS, STATE = range(7)  # the sections
ROWS = {SEGMENTS: "<QQIIQ", PAGES: "<16s16sQIIIBB10x", CHUNKS: "<QQIHBxQQIII12x", DIMS: "<q"}


def name_of(row: Row, suffix: str) -> str:
    """The name of a file in man/."""
    return f"man/{row.epoch:08x}-{row.txid:012x}.{suffix}"


def read_body(store: Path, row: Row, report: Report, name: str = "") -> bytes:
    """The body of a manifest, or of another sealed file, each leaf of it from whichever copy holds it."""
    name, length = name or name_of(row, f"r{row.rank:04x}"), row.length
    paths = [path for path in (store / name, store / f"{name}.m") if size_of(path) >= length]
    spans = [(at, min(MANIFEST_LEAF, length - at)) for at in range(0, length if paths else 0, MANIFEST_LEAF)]
    tables = [read_at(path, length, 8 * len(spans)) for path in paths]  # should both be damaged, the bodies give it
    tables += [b"".join(leaf_digests(read_at(path, *span), MANIFEST_LEAF) for span in spans) for path in paths]
    table = next((table for table in tables if root_digest(table, length) == row.digest), b"")
    if not table:
        raise Damage(f"{name}: no copy of it is long enough and matches the commit's digest")
    body = []
    for number, span in enumerate(spans):
        leaves = [read_at(path, *span) for path in paths]
        good = [leaf for leaf in leaves if leaf_digests(leaf, MANIFEST_LEAF) == table[8 * number : 8 * number + 8]]
        if not good:
            raise Damage(f"{name}: the leaf at {span[0]} is damaged in every copy")
        body.append(good[0])
    if len(set(tables)) > 1 or len(paths) < 2:
        report.notes.append(f"{name}: one of the copies is damaged or missing; the other one is used")
    return b"".join(body)


def read_root(store: Path, commit: Commit, report: Report) -> list[Row]:
    """The root rows of a commit: docs/FORMAT.md section 6.1."""
    if commit.ranks == 1:
        return [commit.row]
    name = name_of(commit.row, "root")
    cursor = Cursor(read_body(store, commit.row, report, name))
    magic, version, ranks, *place, _, features = cursor.unpack("<8sIIQQQQQ8x")
    if (magic, version, ranks, place) != (b"TLROOT01", 1, commit.ranks, [*commit.row[1:4]]) or features:
        raise Damage(f"{name}: its header does not fit its commit")
    rows = [Row(*cursor.unpack(ROW)) for _ in range(ranks)]
    if any(row.rank != rank or row.txid > commit.txid for rank, row in enumerate(rows)):
        raise Damage(f"{name}: its rows are not those of ranks 0 to {ranks - 1}")
    return rows


class Manifest:
    """The tables of one rank of a commit, and the way from a chunk to its bytes."""

    def __init__(self, store: Path, pin: Row, report: Report, ranks: int = 1) -> None:
        self.store, self.report, cursor = store, report, Cursor(body := read_body(store, pin, report))
        magic, version, rank, world, self.page_size, features, *place = cursor.unpack("<8sIIII8xQQQQ")
        if magic != b"TLMAN001" or version != 1 or features:
            raise Damage(f"manifest of format {version}, features {features:#x}: not readable by this release")
        if (rank, *place) != pin[:4] or world != ranks or self.page_size > MAX_PAGE:
            raise Damage(f"manifest whose header does not fit its commit: rank {rank} of {world}, txid {place[1]}")
        sections = [cursor.unpack("<QQ") for _ in range(7)]
        if any(offset % 64 or offset + length > len(body) for offset, length in sections):
            raise Damage("manifest with a section that goes beyond it")
        self.sections = [body[offset : offset + length] for offset, length in sections]
        self.chunks, self.state = self.count(CHUNKS), self.sections[STATE]
        self.budget = SPARE + 16 * self.page_size * self.count(PAGES)
        self.page = functools.lru_cache(maxsize=8)(self._page)
        self.lost = list[str]()  # shards that are damaged: of a commit by one rank there is no other

    def texts(self) -> dict[str, str]:
        """What is no tensor, as it is stored."""
        return {"state": self.state.decode("ascii", "backslashreplace")}

    def count(self, section: int) -> int:
        """How many rows a section has."""
        return len(self.sections[section]) // struct.calcsize(ROWS[section])

    def row(self, section: int, number: int) -> tuple[Any, ...]:
        """A row of a section."""
        return Cursor(self.sections[section], number * struct.calcsize(ROWS[section])).unpack(ROWS[section])

    def segment(self, number: int) -> tuple[str, int]:
        """The name and the size of a segment."""
        epoch, txid, rank, n, size = self.row(SEGMENTS, number)
        return f"seg/{epoch:08x}-{txid:012x}.r{rank:04x}.{n:04x}", size

    def missing(self) -> list[str]:
        """The segments that are not there with their size."""
        segments = (self.segment(number) for number in range(self.count(SEGMENTS)))
        return [f"{name} does not have {size} bytes" for name, size in segments if size_of(self.store / name) != size]

    def _page(self, number: int) -> bytes:
        raw_digest, digest, at, segment, length, size, codec, item = self.row(PAGES, number)
        name, _ = self.segment(segment)
        where = f"page {number}, {name}, offset {at}"
        try:
            if at % BLOCK or size > self.page_size or codec > 1:
                raise Damage(f"codec {codec}, raw length {size}")
            stored = read_at(self.store / name, at, length)
            if len(stored) != length:
                raise Damage("the file is missing, too short, or not readable there")
            if page_digest(stored) != digest:
                raise Damage("the stored bytes do not match their digest")
            raw = decode_planes(stored, size, item) if codec else stored
            if len(raw) != size or page_digest(raw) != raw_digest:
                raise Damage("the raw bytes do not match their digest")
        except ValueError as damage:
            raise Damage(f"{where}: {damage}") from None
        if read_at(self.store / name, at + length, padding := -length % BLOCK) != bytes(padding):
            self.report.notes.append(f"{where}: what follows it up to the next block is not zero")
        return raw

    def charge(self, size: int) -> None:
        """Bound what a small hostile manifest makes of its pages, by strides of 0 or by naming them again and again."""
        if size > self.budget:
            raise Damage("the tensors together are far larger than what is stored")
        self.budget -= size

    def key(self, number: int) -> str:
        """The key of a chunk."""
        digest, start, length, *_ = self.row(CHUNKS, number)
        key = self.sections[KEYS][start : start + length]
        if len(key) != length or xxhash.xxh3_64_intdigest(key) != digest:
            raise Damage(f"chunk {number}: its key is damaged")
        return Cursor(key).text(length)

    def box(self, number: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The key of a chunk, and where in a whole tensor of which shape it begins."""
        _, _, _, _, ndim, dims, *_ = self.row(CHUNKS, number)
        numbers = [self.row(DIMS, dims + at)[0] for at in range(2 * ndim)]
        return self.key(number), tuple(numbers[ndim:]), tuple(numbers[:ndim])

    def chunk(self, number: int) -> Tensor:
        """A chunk: dtype, sizes and bytes, every page of them checked."""
        _, _, _, code, ndim, dims, length, first, count, offset = self.row(CHUNKS, number)
        shape = [self.row(DIMS, dims + 2 * ndim + axis)[0] for axis in range(ndim)]
        dtype, size = [("", 0), *SIZES.items()][code if code <= len(SIZES) else 0]
        have = sum(self.row(PAGES, page)[5] for page in range(first, first + count))
        fits = offset <= self.page_size and 0 <= have - offset - length <= self.page_size
        if not size or not fits or min(shape, default=0) < 0 or math.prod(shape) * size != length:
            raise Damage(f"chunk {number}: {length} bytes at {offset} of {have} for {dtype}{shape} (dtype {code})")
        self.charge(length)
        data = b"".join(map(self.page, range(first, first + count)))
        return dtype, tuple(shape), data[offset : offset + length]
