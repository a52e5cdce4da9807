"""Stores that somebody made to harm: their digests are right, their tables are not.

Each is opened in a child that has 4 seconds of a processor, and whose address space may grow by 192 MiB. Whatever the
bytes say, every call gives an error of tierload's own, or a value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
import zstandard

from tests.rescue.builder import LZ4, RAW, ZSTD, Builder, Chunk, array, tensor, tree
from tests.store.ondisk import section_of
from tests.store.probe import META, Outcomes, probe, unclean

HUGE = 1 << 62
SEGMENTS, PAGES, CHUNKS, INDEX, DIMS, KEYS, STATE = range(1, 8)
NAMES = ("segments", "pages", "chunks", "index", "dims", "keys", "state")
Tamper = Callable[[bytearray], None]


def ordinary(builder: Builder) -> int:
    """Two tensors with pages of their own, two that share a page."""
    chunks = {
        "a": array(np.arange(40_000, dtype=np.float32)),
        "b": array(np.arange(30, dtype=np.int64), pack="p"),
        "c": array(np.arange(20, dtype=np.int64), pack="p"),
        "d": Chunk("uint8", (70_000,), bytes(range(250)) * 280, kinds=[LZ4]),
    }
    sizes = {key: list(chunk.sizes) for key, chunk in chunks.items()}
    return builder.commit(chunks, {"d": {key: tensor(key, size) for key, size in sizes.items()}}, step=1, meta=META)


def field(section: int, row: int, offset: int, form: str, value: int) -> Tamper:
    """Sets a field of a row (of the section's first row for row 0)."""
    size = {SEGMENTS: 32, PAGES: 64, CHUNKS: 64, INDEX: 4, DIMS: 8, KEYS: 1, STATE: 1}[section]

    def tamper(body: bytearray) -> None:
        at, _ = section_of(bytes(body), section)
        struct.pack_into("<" + form, body, at + row * size + offset, value)

    return tamper


def header(offset: int, form: str, *values: int | bytes) -> Tamper:
    return lambda body: struct.pack_into("<" + form, body, offset, *values)


def place(section: int, offset: int, length: int) -> Tamper:
    return header(48 + 16 * section, "QQ", offset, length)


def over(section: int, other: int) -> Tamper:
    """Puts a section where another one is, with its own length."""

    def tamper(body: bytearray) -> None:
        place(section, section_of(bytes(body), other)[0], section_of(bytes(body), section)[1])(body)

    return tamper


def all_of(*tampers: Tamper) -> Tamper:
    def tamper(body: bytearray) -> None:
        for each in tampers:
            each(body)

    return tamper


ROWS: dict[str, Tamper] = {
    "a segment of 2^62 bytes": field(SEGMENTS, 0, 24, "Q", HUGE),
    "a segment of 0 bytes": field(SEGMENTS, 0, 24, "Q", 0),
    "a segment of epoch 2^64-1": field(SEGMENTS, 0, 0, "Q", 2**64 - 1),
    "a segment of rank 2^32-1": field(SEGMENTS, 0, 16, "I", 2**32 - 1),
    "a page at 2^62": field(PAGES, 0, 32, "Q", HUGE),
    "a page whose end wraps around": all_of(
        field(SEGMENTS, 0, 24, "Q", 2**64 - 1), field(PAGES, 0, 32, "Q", 2**64 - 4096), field(PAGES, 0, 44, "I", 4095)
    ),
    "pages that end beyond 2^63": all_of(
        field(SEGMENTS, 0, 24, "Q", 2**64 - 1), field(PAGES, 1, 32, "Q", 2**63 - 4096)
    ),
    "a page over another page": field(PAGES, 1, 32, "Q", 0),
    "keys over the state": over(KEYS, STATE),
    "dims over the chunks": over(DIMS, CHUNKS),
    "the state over the keys": over(STATE, KEYS),
    "segments over the pages": over(SEGMENTS, PAGES),
    "an index over the dims": over(INDEX, DIMS),
    "a page off the grid": field(PAGES, 0, 32, "Q", 1),
    "a page in segment 2^32-1": field(PAGES, 0, 40, "I", 2**32 - 1),
    "a stored length of 2^32-1": field(PAGES, 0, 44, "I", 2**32 - 1),
    "a stored length of 0": field(PAGES, 0, 44, "I", 0),
    "a raw length of 2^32-1": field(PAGES, 0, 48, "I", 2**32 - 1),
    "a raw length of 16 MiB": field(PAGES, 0, 48, "I", 16 << 20),
    "a raw length of 0": field(PAGES, 0, 48, "I", 0),
    "an unknown codec": field(PAGES, 0, 52, "B", 7),
    "raw bytes that are called planes": field(PAGES, 0, 52, "B", 1),
    "planes that are called raw bytes": field(PAGES, 4, 52, "B", 0),
    "items of 3 bytes": field(PAGES, 0, 53, "B", 3),
    "items of 0 bytes": field(PAGES, 0, 53, "B", 0),
    "planes of another item size": field(PAGES, 4, 53, "B", 8),
    "a key at 2^62": field(CHUNKS, 0, 8, "Q", HUGE),
    "a key at 2^64-1": field(CHUNKS, 0, 8, "Q", 2**64 - 1),
    "a key of 2^32-1 bytes": field(CHUNKS, 0, 16, "I", 2**32 - 1),
    "dtype 65535": field(CHUNKS, 0, 20, "H", 65535),
    "255 dimensions": field(CHUNKS, 0, 22, "B", 255),
    "dims at 2^62": field(CHUNKS, 0, 24, "Q", HUGE),
    "dims at 2^64-1": field(CHUNKS, 0, 24, "Q", 2**64 - 1),
    "a chunk of 2^62 bytes": field(CHUNKS, 0, 32, "Q", HUGE),
    "a chunk of 2^64-1 bytes": field(CHUNKS, 0, 32, "Q", 2**64 - 1),
    "a chunk of 0 bytes with pages": field(CHUNKS, 0, 32, "Q", 0),
    "a first page of 2^32-1": field(CHUNKS, 0, 40, "I", 2**32 - 1),
    "2^32-1 pages": field(CHUNKS, 0, 44, "I", 2**32 - 1),
    "no pages": field(CHUNKS, 0, 44, "I", 0),
    "pages that two chunks have": field(CHUNKS, 3, 40, "I", 0),
    "a packed chunk at 2^32-1": all_of(field(CHUNKS, 1, 48, "I", 2**32 - 1), field(CHUNKS, 1, 23, "B", 1)),
    "an offset in a chunk that is not packed": field(CHUNKS, 0, 48, "I", 4),
    "a packed chunk of three pages": field(CHUNKS, 0, 23, "B", 1),
    "an index beyond the chunks": field(INDEX, 0, 0, "I", 2**32 - 1),
    "a size of -1": field(DIMS, 0, 0, "q", -1),
    "a size of -2^63": field(DIMS, 0, 0, "q", -(2**63)),
    "a size of 2^62": field(DIMS, 0, 0, "q", HUGE),
    "an offset of 2^62": field(DIMS, 1, 0, "q", HUGE),
    "a part of a larger tensor": field(DIMS, 0, 0, "q", 80_000),
    "two equal keys": field(KEYS, 1, 0, "B", ord("a")),
    "keys out of order": field(KEYS, 0, 0, "B", ord("z")),
    "a key that is no UTF-8": field(KEYS, 3, 0, "B", 0xFF),
    "a document that is no JSON": field(STATE, 0, 0, "B", ord("[")),
    "a document that is no ASCII": field(STATE, 3, 0, "B", 0xC3),
    "another magic": header(0, "8s", b"TLMAN002"),
    "another rank": header(12, "I", 7),
    "a world of 2^32-1 ranks": header(16, "I", 2**32 - 1),
    "another epoch": header(40, "Q", 2**64 - 1),
    "another txid": header(48, "Q", 0),
    "a body of 2^62 bytes": header(56, "Q", HUGE),
}
for _number, _name in enumerate(NAMES, 1):
    ROWS |= {
        f"{_name} at 2^62": place(_number, HUGE, 64),
        f"{_name} of 2^62 bytes": place(_number, 256, HUGE),
        f"{_name} of 2^64-64 bytes": place(_number, 256, 2**64 - 64),
        f"{_name} over the header": place(_number, 0, 64),
    }
    if _name not in ("keys", "state", "dims", "segments"):
        ROWS[f"no {_name}"] = place(_number, 256, 0)
    if _name not in ("keys", "state"):
        ROWS[f"{_name} of half a row"] = place(_number, 256, 2)

HARMLESS: dict[str, Tamper] = {
    "pages of 0 bytes, they say": header(20, "I", 0),
    "unknown compatible features": header(24, "Q", 2**63),
    "wrong hashes of keys": field(CHUNKS, 0, 0, "Q", 5),
    "a heat": field(PAGES, 0, 54, "H", 65535),
    "unknown flags of a page": field(PAGES, 0, 56, "I", 2**32 - 2),
}


def tampered(path: Path, tamper: Tamper) -> Outcomes:
    builder = Builder(path)
    builder.tamper = all_of(field(CHUNKS, 1, 23, "B", 1), field(CHUNKS, 2, 23, "B", 1), tamper)  # packed, as they are
    ordinary(builder)
    return probe(path)


@pytest.mark.parametrize("name", ROWS)
def test_a_manifest_whose_rows_lie(ram: Path, name: str) -> None:
    found = tampered(ram / "store", ROWS[name])
    assert not unclean(found)
    whole = name == "a segment of 2^62 bytes"  # its pages are there, and every byte of them is verified
    assert found["load"][0] in ("CorruptStore", "CorruptPage") or whole, found
    assert found["open"][0] == found["history"][0] == found["verify"][0] == "", found
    assert found["damage"][1] or "state document" in found["load"][1] or "key" in found["load"][1]
    assert found["load what was saved"][0] == "", found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_reader_may_ignore(ram: Path, name: str) -> None:
    found = tampered(ram / "store", HARMLESS[name])
    assert {error for error, _ in found.values()} <= {"", "CommitNotFound"}, found


# -- pages


def plane_page(item: int, kind: int, frames: list[bytes], counts: int | None = None) -> bytes:
    """One plane of a kind, made of frames as they are given."""
    head = struct.pack("<BBH", item, 0, 0)
    for plane in range(item):
        stored = sum(map(len, frames)) if plane == 0 else 0
        number = len(frames) if counts is None else counts
        head += struct.pack("<BBHI", kind if plane == 0 else 1, 0, number if plane == 0 else 0, stored)
    return head + b"".join(struct.pack("<I", len(frame)) for frame in frames) + b"".join(frames)


BOMB = bytes(96 << 20)
PAGES_THAT_LIE: dict[str, Callable[[], bytes]] = {
    "a zstd bomb": lambda: plane_page(1, ZSTD, [zstandard.compress(BOMB)]),
    "a zstd bomb that hides its size": lambda: plane_page(
        1, ZSTD, [zstandard.ZstdCompressor(write_content_size=False).compress(BOMB)]
    ),
    "a zstd frame with a window of 2 GiB": lambda: plane_page(1, ZSTD, [b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00"]),
    "two zstd frames in one": lambda: plane_page(1, ZSTD, [zstandard.compress(b"x" * 4000) * 2]),
    "an LZ4 bomb": lambda: plane_page(1, LZ4, [lz4.block.compress(BOMB, store_size=False)]),
    "an LZ4 block that ends early": lambda: plane_page(
        1, LZ4, [lz4.block.compress(bytes(8000), store_size=False)[:-3]]
    ),
    "65535 frames": lambda: plane_page(1, ZSTD, [zstandard.compress(bytes(8000))], counts=65535),
    "frames that are empty": lambda: plane_page(1, ZSTD, [b""]),
    "a plane of an unknown kind": lambda: plane_page(1, 9, [bytes(100)]),
    "a plane that is too short": lambda: plane_page(1, RAW, []) + bytes(10),
    "a header alone": lambda: struct.pack("<BBH", 1, 0, 0),
    "bytes behind the planes": lambda: plane_page(1, ZSTD, [zstandard.compress(bytes(8000))]) + bytes(1),
    "an unknown transform": lambda: b"\x01\x09" + plane_page(1, ZSTD, [zstandard.compress(bytes(8000))])[2:],
    "noise": lambda: np.random.default_rng(3).bytes(4000),
}


@pytest.mark.parametrize("name", PAGES_THAT_LIE)
def test_a_page_that_lies(ram: Path, name: str) -> None:
    """Its stored digest is right, so that the decoder sees it."""
    stored = PAGES_THAT_LIE[name]()
    raw = bytes(8000) if len(stored) <= 8000 else bytes(1 << 20)

    class Liar(Builder):
        def page(self, segment: Any, raw: bytes, chunk: Chunk, item: int) -> tuple[Any, ...]:
            at = segment.add(stored)
            return tree(raw, 16 << 10), segment, at, tree(stored, 16 << 10), len(stored), len(raw), 1, 1

    builder = Liar(ram / "store", page_size=1 << 20)
    assert len(stored) <= len(raw)
    builder.commit({"a": Chunk("uint8", (len(raw),), raw)}, {"d": {"a": tensor("a", [len(raw)])}}, meta=META)
    found = probe(ram / "store")
    assert not unclean(found)
    assert found["load"][0] == "CorruptPage", found
    for part in ("'a'", "seg/00000001-000000000001.r0000.0000", "byte 0"):
        assert part in found["load"][1]
    assert found["damage"][1]


def test_many_rows_that_share_one_small_page(ram: Path) -> None:
    """8 GiB of raw bytes out of 4 KiB: reading them is what the user asks for, so it may fail for want of memory, but
    verifying takes one page at a time."""
    item = plane_page(1, 1, [])

    class Repeating(Builder):
        def page(self, segment: Any, raw: bytes, chunk: Chunk, item_size: int) -> tuple[Any, ...]:
            at = segment.add(item) if not segment.data else 0
            return tree(bytes(16 << 20), 16 << 10), segment, at, tree(item, 16 << 10), len(item), 16 << 20, 1, 1

    count = 32
    builder = Repeating(ram / "store", page_size=1)
    builder.tamper = lambda body: [
        f(body)
        for f in (
            field(CHUNKS, 0, 32, "Q", count * (16 << 20)),
            field(DIMS, 0, 0, "q", count * (16 << 20)),
            field(DIMS, 2, 0, "q", count * (16 << 20)),
        )
    ]
    document = f'{{"version":1,"root":{{"t":{{"chunk":0,"shape":[{count * (16 << 20)}]}}}}}}'
    builder.commit({"a": Chunk("uint8", (count,), bytes(count))}, None, document=document, meta=META)
    found = probe(ram / "store")
    assert found["load"][0] in ("!MemoryError", "CorruptStore")
    assert "'a'" in found["load"][1] or "a" in found["load"][1]
    assert found["verify"] == ("", "")
    assert found["damage"][1] == ""
    assert {call for call in found if found[call][0].startswith("!")} <= {"load", "load 1"}
