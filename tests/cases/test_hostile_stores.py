"""B65: manifests that somebody forged, with digests that fit.

The stores are made by tests/rescue/builder.py, which shares nothing with the engine. Loads run in a child of bounded
memory that is killed after some seconds.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, state_of
from tests.rescue.builder import CONST, Builder, Chunk, array, tensor
from tests.store.ondisk import section_of
from tests.store.support import Outcome, in_child

MIB = 700
SEGMENTS, PAGES, CHUNKS, DIMS = 1, 2, 3, 5
META = {"metrics": {"d": {}}, "note": ""}


def build(path: Path, tamper: Callable[[bytearray], None] | None = None, document: str | None = None) -> Path:
    """A store of step 1 as it should be, and step 2 whose manifest was tampered with."""
    builder = Builder(path)
    weights = {"a": array(np.arange(3000.0)), "b": array(np.arange(50, dtype=np.int64))}
    root = {"d": {"a": tensor("a", [3000]), "b": tensor("b", [50])}}
    builder.commit(weights, root, step=1, meta=META)
    builder.tamper = tamper
    changed = {"a": array(np.arange(3000.0) * 2), "b": array(np.arange(50, dtype=np.int64) + 1)}
    builder.commit(changed, root, step=2, meta=META, document=document)
    return path


def attempt(path: Path, **which: Any) -> Outcome:
    return in_child(lambda: len(tierload.load(path, **which)), seconds=20, mib=MIB)


def put(section: int, row: int, offset: int, form: str, *values: int) -> Callable[[bytearray], None]:
    """Overwrites a field in a row of a section: 32 bytes a segment, 64 a page or chunk, 8 a dim."""

    def tamper(body: bytearray) -> None:
        size = {SEGMENTS: 32, DIMS: 8}.get(section, 64)
        struct.pack_into(form, body, section_of(bytes(body), section)[0] + row * size + offset, *values)

    return tamper


def put_header(offset: int, form: str, *values: int) -> Callable[[bytearray], None]:
    return lambda body: struct.pack_into(form, body, offset, *values)


def same_keys(body: bytearray) -> None:
    chunks = section_of(bytes(body), CHUNKS)[0]
    body[chunks + 64 + 8 : chunks + 64 + 20] = body[chunks + 8 : chunks + 20]  # the key of chunk 1 is that of chunk 0


FORGED: dict[str, Callable[[bytearray], None]] = {
    "a segment of another place": put(SEGMENTS, 0, 0, "<QQII", 2**64 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1),
    "a page at 2**62": put(PAGES, 0, 32, "<Q", 2**62),
    "a page at -4096": put(PAGES, 0, 32, "<q", -4096),
    "a page at an odd offset": put(PAGES, 0, 32, "<Q", 100),
    "a page in segment 7": put(PAGES, 0, 40, "<I", 7),
    "a page of 4 GiB on disk": put(PAGES, 0, 44, "<I", 2**32 - 1),
    "a page of 4 GiB": put(PAGES, 0, 48, "<I", 2**32 - 1),
    "a page of another codec": put(PAGES, 0, 52, "<B", 9),
    "a page of items of 0 bytes": put(PAGES, 0, 53, "<B", 0),
    "pages that overlap": put(PAGES, 1, 32, "<Q", 0),
    "the same key twice": same_keys,
    "a key at 2**62": put(CHUNKS, 0, 8, "<Q", 2**62),
    "a key of 4 GiB": put(CHUNKS, 0, 16, "<I", 2**32 - 1),
    "200 dimensions": put(CHUNKS, 0, 22, "<B", 200),
    "dims at 2**62": put(CHUNKS, 0, 24, "<Q", 2**62),
    "a chunk of 2**62 bytes": put(CHUNKS, 0, 32, "<Q", 2**62),
    "pages from 2**32 on": put(CHUNKS, 0, 40, "<I", 2**32 - 1),
    "2**32 pages": put(CHUNKS, 0, 44, "<I", 2**32 - 1),
    "an offset in a page": put(CHUNKS, 0, 48, "<I", 2**31),
    "a dtype that there is not": put(CHUNKS, 0, 20, "<H", 99),
    "a shape of 2**62": put(DIMS, 0, 0, "<q", 2**62),
    "a negative shape": put(DIMS, 0, 0, "<q", -1),
    "a section at 2**62": put_header(64 + 16, "<Q", 2**62),
    "a section of 2**62 bytes": put_header(64 + 24, "<Q", 2**62 // 64 * 64),
    "sections that overlap the header": put_header(64 + 16, "<Q", 0),
    "a body of 2**62 bytes": put_header(56, "<Q", 2**62),
    "another rank": put_header(12, "<I", 3),
}


@pytest.mark.parametrize("what", FORGED)
def test_b65_forged_manifests(ram: Path, what: str) -> None:
    """Refused with a format error, in bounded memory; the commit before it loads."""
    path = build(ram / "store", FORGED[what])
    outcome = attempt(path, step=2)
    assert not outcome.signal, f"the process was ended by signal {outcome.signal}"
    assert outcome.refused, f"{outcome.error or outcome.value}: {outcome.trace}"
    assert attempt(path, step=1).value == 2


def test_b65_the_builders_store_is_a_store(ram: Path) -> None:
    path = build(ram / "store")
    assert torch.equal(tierload.load(path)["a"], torch.arange(3000, dtype=torch.float64) * 2)
    assert tierload.open(path).verify(full=True).ok


def test_b65_a_segment_that_is_said_to_be_huge(ram: Path) -> None:
    """Not believed: the commit is passed over; asked for by name, its pages are checked like any others."""
    path = build(ram / "store", put(SEGMENTS, 0, 24, "<Q", 2**62))
    with pytest.warns(UserWarning, match=str(2**62)):
        assert torch.equal(tierload.load(path)["a"], torch.arange(3000, dtype=torch.float64))
    assert torch.equal(tierload.load(path, step=2)["a"], torch.arange(3000, dtype=torch.float64) * 2)
    assert not tierload.open(path).verify().ok


DOCUMENTS = {
    "nested 100,000 deep": '{"version":1,"root":' + "[" * 100_000 + "]" * 100_000 + "}",
    "dicts 100,000 deep": '{"version":1,"root":' + '{"d":{"a":' * 100_000 + "1" + "}}" * 100_000 + "}",
    "a chunk that there is not": '{"version":1,"root":{"t":{"chunk":7,"shape":[1]}}}',
    "a negative chunk": '{"version":1,"root":{"t":{"chunk":-1,"shape":[3000]}}}',
    "a tensor larger than its chunk": '{"version":1,"root":{"t":{"chunk":0,"shape":[4611686018427387904]}}}',
    "a view that leaves its chunk": '{"version":1,"root":{"t":{"chunk":0,"shape":[9],"stride":[1],"offset":2995}}}',
    "a view before its chunk": '{"version":1,"root":{"t":{"chunk":0,"shape":[9],"stride":[1],"offset":-1}}}',
    "the same name twice": '{"version":1,"root":{"d":{"a":1,"a":2}}}',
    "a huge integer": '{"version":1,"root":' + "9" * 1_000_000 + "}",
    "no JSON": '{"version":1,"root":',
    "a folder that leads out": '{"version":1,"root":{"folder":{"entries":[["../x",{"file":{"chunk":0,"mode":420}}]]}}}',
    "a link that leads out": '{"version":1,"root":{"folder":{"entries":[["x",{"link":"/etc/passwd"}]]}}}',
    "an absolute file": '{"version":1,"root":{"file":{"chunk":null,"mode":420,"name":"/etc/x"}}}',
}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_b65_forged_documents(ram: Path, what: str) -> None:
    path = build(ram / "store", document=DOCUMENTS[what])
    outcome = attempt(path, step=2)
    assert not outcome.signal
    assert outcome.refused, f"{outcome.error or outcome.value}: {outcome.trace}"


@pytest.mark.parametrize("claimed", [1 << 24, 1 << 20])
def test_b65_a_page_that_is_a_bomb(ram: Path, claimed: int) -> None:
    """12 bytes that claim to be a page of megabytes: it is decoded into that page's memory and no more, and refused."""

    def tamper(body: bytearray) -> None:
        put(PAGES, 0, 48, "<I", claimed)(body)
        put(CHUNKS, 0, 32, "<Q", claimed)(body)
        for dim in (0, 2):
            put(DIMS, dim, 0, "<q", claimed)(body)

    builder = Builder(ram / "store")
    builder.tamper = tamper
    document = f'{{"version":1,"root":{{"t":{{"chunk":0,"shape":[{claimed}]}}}}}}'
    zeros = {"z": Chunk("uint8", (4096,), bytes(4096), kinds=[CONST])}
    builder.commit(zeros, tensor("z", [4096]), meta=META, document=document)
    outcome = in_child(lambda: tierload.load(ram / "store").shape, seconds=20, mib=200)
    assert outcome.error == "CorruptPage", outcome


def test_b65_a_bomb_of_100_gib(ram: Path) -> None:
    """102400 pages of 1 MiB that are the same 12 bytes on disk: no more memory is taken than there is."""
    pages, size = 102_400, 1 << 20
    builder = Builder(ram / "store", page_size=size)
    zeros = Chunk("uint8", (size,), bytes(size), kinds=[CONST])
    builder.commit({"z": zeros}, tensor("z", [size]), meta=META)
    total = pages * size

    def tamper(body: bytearray) -> None:
        """One row of pages becomes 102400; what is behind them moves."""
        sections = [bytes(body[at : at + length]) for at, length in (section_of(bytes(body), n) for n in range(1, 8))]
        sections[PAGES - 1] *= pages
        chunk = bytearray(sections[CHUNKS - 1])
        struct.pack_into("<Q", chunk, 32, total)
        struct.pack_into("<I", chunk, 44, pages)
        sections[CHUNKS - 1] = bytes(chunk)
        sections[DIMS - 1] = struct.pack("<qqq", total, 0, total)
        del body[256:]
        for number, section in enumerate(sections):
            body += bytes(-len(body) % 64)
            struct.pack_into("<QQ", body, 64 + 16 * number, len(body), len(section))
            body += section
        struct.pack_into("<Q", body, 56, len(body))

    builder.tamper = tamper
    document = f'{{"version":1,"root":{{"t":{{"chunk":0,"shape":[{total}]}}}}}}'
    builder.commit({"z": zeros}, tensor("z", [size]), meta=META, document=document, step=2)
    assert sum(path.stat().st_size for path in (ram / "store" / "seg").iterdir()) < 20_000
    with tierload.open(ram / "store") as store:
        assert store.keys()[0].nbytes == total, "how large it is can be seen before"
    outcome = attempt(ram / "store")
    assert not outcome.signal, "the process was ended"
    assert outcome.error, "100 GiB in an address space of 700 MiB"
    assert outcome.refused or "MemoryError" in outcome.bases or "allocate" in outcome.message, outcome


@pytest.mark.parametrize("name", ["seg/00000001-000000000001.r0000.0000", "man/00000001-000000000001.r0000", "SUPER"])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "copy"])
def test_b65_links_that_lead_out(ram: Path, name: str, target: str) -> None:
    """A link is not followed, even to the very same bytes. (Instead of a manifest, its mirror may be used.)"""
    path = ram / "store"
    tierload.save(state_of(1), path, settings=SMALL)
    let_go(ram)
    original = path / name
    copy = ram / "outside" if target == "../../outside" else original.with_name("copy")
    copy.write_bytes(original.read_bytes())
    original.unlink()
    original.symlink_to(copy if target == "copy" else target)
    outcome = in_child(lambda: assert_is(tierload.load(path), 1), seconds=20)
    assert not outcome.signal
    if outcome.error or not name.startswith("man/"):
        assert outcome.refused, outcome
        assert name in outcome.message


def test_b65_folders_that_are_links(ram: Path) -> None:
    path = ram / "store"
    tierload.save(state_of(1), path, settings=SMALL)
    let_go(ram)
    os.rename(path / "seg", ram / "elsewhere")
    (path / "seg").symlink_to(ram / "elsewhere")
    outcome = in_child(lambda: tierload.load(path), seconds=20)
    assert "OSError" in outcome.bases, outcome
