"""A store's bytes, from docs/FORMAT.md alone: where records, pages and padding lie, and seals for what was changed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from tests.rescue.builder import crc, leaves, tree

SECTOR = 4096
LEAF = 64 << 10


def files_of(store: Path) -> list[str]:
    """Every file's path inside the store, sorted."""
    return sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())


def sectors_up(value: int) -> int:
    return -(-value // SECTOR) * SECTOR


@dataclass(frozen=True)
class Record:
    """One record of a journal: its place, with the padding to 8 bytes, and what it says."""

    start: int
    end: int
    kind: int
    flags: int
    lsn: int
    payload: bytes


def records_of(journal: bytes) -> list[Record]:
    """The records of a whole journal, along its chain."""
    salt, lsn, chain = journal[64:72], *struct.unpack_from("<Q", journal, 72), *struct.unpack_from("<I", journal, 104)
    found: list[Record] = []
    at = SECTOR
    while at + 64 <= len(journal):
        head = journal[at : at + 64]
        sum_, length, kind, flags, number = struct.unpack_from("<IHBBQ", head)
        size, payload_sum, before = struct.unpack_from("<III", head, 32)
        payload = journal[at + 64 : at + 64 + size]
        if (length, number, before) != (64, lsn, chain) or sum_ != crc(head[4:], crc(salt)):
            break
        if len(payload) != size or crc(payload) != payload_sum:
            break
        end = at + 64 + -(-size // 8) * 8
        found.append(Record(at, end, kind, flags, number, payload))
        at, lsn, chain = (sectors_up(end) if flags & 1 else end), lsn + 1, sum_
    return found


def journal_end(journal: bytes) -> int:
    """Where the last record ends: what is behind it means nothing."""
    return records_of(journal)[-1].end


def seal(sector: bytearray) -> bytes:
    """A SUPER slot or a journal header with the crc that its bytes need."""
    return bytes(sector[: SECTOR - 4]) + struct.pack("<I", crc(bytes(sector[: SECTOR - 4])))


def patched(sector: bytes, offset: int, form: str, *values: int | bytes) -> bytes:
    """A sector with some fields replaced, sealed."""
    changed = bytearray(sector)
    struct.pack_into(form, changed, offset, *values)
    return seal(changed)


def manifest_file(body: bytes) -> bytes:
    return body + leaves(body, LEAF)


def root_row(body: bytes, epoch: int, txid: int, rank: int = 0, length: int | None = None) -> bytes:
    """A root row that pins a manifest body, with another length when one is given."""
    size = len(body) if length is None else length
    return struct.pack("<IIQQQ16sQQ", rank, 0, epoch, txid, size, tree(body, LEAF), 0, 0)


@dataclass(frozen=True)
class PageAt:
    """A row of pages, as a test wants it."""

    path: str
    offset: int
    stored: int
    raw: int
    codec: int
    keys: tuple[str, ...]


def section_of(manifest: bytes, number: int) -> tuple[int, int]:
    """Offset and length of a section, counted from 1."""
    return struct.unpack_from("<QQ", manifest, 48 + 16 * number)


def pages_of(manifest: bytes) -> list[PageAt]:
    """The pages that a manifest lists, each with the keys that lie in it."""
    segments_at, segments_length = section_of(manifest, 1)
    pages_at, pages_length = section_of(manifest, 2)
    chunks_at, chunks_length = section_of(manifest, 3)
    heap, _ = section_of(manifest, 6)
    keys: dict[int, list[str]] = {}
    for at in range(chunks_at, chunks_at + chunks_length, 64):
        start, length = struct.unpack_from("<QI", manifest, at + 8)
        first, count = struct.unpack_from("<II", manifest, at + 40)
        for page in range(first, first + count):
            keys.setdefault(page, []).append(manifest[heap + start : heap + start + length].decode())
    paths = []
    for at in range(segments_at, segments_at + segments_length, 32):
        epoch, txid, rank, number, _ = struct.unpack_from("<QQIIQ", manifest, at)
        paths.append(f"seg/{epoch:08x}-{txid:012x}.r{rank:04x}.{number:04x}")
    found = []
    for page, at in enumerate(range(pages_at, pages_at + pages_length, 64)):
        offset, segment, stored, raw, codec = struct.unpack_from("<QIIIB", manifest, at + 32)
        found.append(PageAt(paths[segment], offset, stored, raw, codec, tuple(keys[page])))
    return found
