"""A second opinion on a store: what the rescue reader finds in it against what was saved, without the engine.

`check_store` compares every tensor, `check_layout` holds the files to what docs/FORMAT.md says about bytes that readers
can do without. `expected_tensors` tells what a state has.
"""

from __future__ import annotations

import collections
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from tests.rescue.expected import expected_tensors
from tierload import rescue
from tierload.rescue.catalog import Commit, open_catalog
from tierload.rescue.manifest import (
    CHUNKS,
    DIMS,
    INDEX,
    KEYS,
    PAGES,
    SIZES,
    STATE,
    Manifest,
    Tensor,
    read_body,
    read_root,
)

__all__ = ["check_layout", "check_store", "check_tensors", "expected_tensors"]


def check_store(path: str | os.PathLike[str], expected: Mapping[str, Mapping[str, Tensor]]) -> list[Commit]:
    """Every commit of a store can be read without any loss, and those that are expected (by id) hold what they should.

    Returns the commits in the order of their txids.
    """
    found = rescue.commits(path)
    assert set(expected) <= {commit.id for commit in found}, "a commit that was acknowledged is not there"
    for commit in found:
        tensors = rescue.read(path, commit=commit.txid)
        if commit.id in expected:
            check_tensors(tensors, expected[commit.id], f"commit {commit.txid} (step {commit.step})")
    return found


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """The same keys, and for each the same dtype, shape and bytes."""
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    assert (missing, more) == ([], []), f"{where}: keys that are missing, and keys that were not saved"
    for key, tensor in expected.items():
        assert found[key][:2] == tensor[:2], f"{where}, {key!r}"
        assert found[key][2] == tensor[2], f"{where}, {key!r}: other bytes"


def check_layout(path: str | os.PathLike[str]) -> None:
    """The files are what the format says to the last byte. Nobody may be writing to the store."""
    store, report = Path(path), rescue.Report()
    catalog = open_catalog(store, report)
    for commit in catalog.commits.values():
        for row in read_root(store, commit, report):
            _check_sections(read_body(store, row, report), commit.ranks)
            manifest = Manifest(store, row, report, commit.ranks)
            assert not manifest.missing()
            _check_chunks(manifest, _check_pages(manifest), row.rank, commit.ranks)
        rescue.read(store, commit=commit.txid, report=report)  # it notes padding that is not zero
    assert (report.problems, report.notes) == ([], [])
    for copy in [*(store / "wal").glob("c-*"), *(store / "man").glob("*.r[0-9o]*[!m]")]:
        mirror = f"m{copy.name[1:]}" if copy.name.startswith("c-") else f"{copy.name}.m"
        assert copy.read_bytes() == copy.with_name(mirror).read_bytes(), copy.name
    assert catalog.head == max(catalog.commits, default=0)
    assert set(catalog.tags.values()) <= catalog.commits.keys()


def _check_sections(body: bytes, ranks: int) -> None:
    """Their order, and zeros wherever nothing is said."""
    assert struct.unpack_from("<I", body, 16) == (ranks,)
    assert not body[176:256].strip(b"\0")
    at = 256
    for offset, length in struct.iter_unpack("<QQ", body[64:176]):
        assert offset == at + -at % 64
        assert not body[at:offset].strip(b"\0")
        at = offset + length
    assert not body[at:].strip(b"\0")


def _check_pages(manifest: Manifest) -> list[tuple[Any, ...]]:
    pages = []
    for number in range(manifest.count(PAGES)):
        raw_digest, digest, offset, segment, length, size, codec, item = manifest.row(PAGES, number)
        heat, flags, reserved = struct.unpack_from("<HII", manifest.sections[PAGES], number * 64 + 54)
        assert (heat, flags & ~1, reserved, offset % 4096) == (0, 0, 0, 0)
        assert item in (1, 2, 4, 8)
        assert 0 < size <= manifest.page_size
        assert codec or (raw_digest, size) == (digest, length)
        assert offset + length + -length % 4096 <= manifest.segment(segment)[1]
        pages.append((size, flags))
    return pages


def _check_chunks(manifest: Manifest, pages: list[tuple[Any, ...]], rank: int, ranks: int) -> None:
    keys, hashes, owned = list[tuple[bytes, list[int]]](), list[int](), list[int]()
    ends: dict[int, int] = collections.defaultdict(int)
    dtypes: dict[int, set[int]] = collections.defaultdict(set)
    sizes = [*SIZES.values()]
    for number in range(manifest.chunks):
        digest, start, key_length, code, ndim, dims, length, first, count, offset = manifest.row(CHUNKS, number)
        flags, reserved = struct.unpack_from("<B28x12s", manifest.sections[CHUNKS], number * 64 + 23)
        assert not reserved.strip(b"\0")
        key = manifest.sections[KEYS][start : start + key_length]
        hashes.append(digest)
        assert digest == xxhash.xxh3_64_intdigest(key)
        cut = [[manifest.row(DIMS, dims + part * ndim + axis)[0] for axis in range(ndim)] for part in range(3)]
        keys.append((key, cut[1]))
        assert ranks > 1 or (cut[0] == cut[2] and not any(cut[1]))
        assert all(at + size <= extent for extent, at, size in zip(*cut, strict=True))
        mine = range(first, first + count)
        assert (length == 0) == (count == 0)
        assert {pages[page][1] for page in mine} == ({flags} if count else set())
        if flags:
            assert (count, offset) == (1, ends[first]), "packed chunks stand back to back"
            ends[first] += length
            dtypes[first].add(code)
        else:
            assert (offset, sum(pages[page][0] for page in mine)) == (0, length)
            owned += mine
        assert length % sizes[code - 1] == 0
    assert keys == sorted(keys)
    assert len({(key, *offsets) for key, offsets in keys}) == len(keys)
    assert sorted([*owned, *ends]) == list(range(len(pages))), "each page has one owner, or is packed"
    assert all(pages[page][0] == end for page, end in ends.items())
    assert all(len(codes) == 1 for codes in dtypes.values())
    index = [number for (number,) in struct.iter_unpack("<I", manifest.sections[INDEX])]
    assert index == sorted(range(len(hashes)), key=lambda number: (hashes[number], number))
    assert manifest.sections[STATE].isascii()
    assert json.loads(manifest.sections[STATE]).keys() == _members(rank, ranks)


def _members(rank: int, ranks: int) -> set[str]:
    """What the document of a rank has."""
    if ranks == 1:
        return {"version", "root"}
    return {"version", "own", "own_tensors"} | ({"ranks", "root", "meshes", "tensors"} if rank == 0 else set())
