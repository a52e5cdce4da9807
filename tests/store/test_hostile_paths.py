"""What a hostile store would like us to open, write or remove: links in place of its files, and names that are paths.

The folder outside is watched by inotify: an open of anything in it, for reading or writing, is an event.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierload
from tests.rescue.builder import Chunk
from tests.rescue.support import simple
from tests.store.ondisk import files_of
from tests.store.probe import META, Forger, Outcomes, probe, unclean
from tests.store.support import Sample, copied, make_sample, ram_folder

_ANYTHING = 0x00000FFF  # IN_ALL_EVENTS


@contextmanager
def untouched(*folders: Path) -> Iterator[None]:
    """Fails when anything in the folders was opened, read, written, made or removed meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watch >= 0
    for folder in folders:
        assert libc.inotify_add_watch(watch, os.fsencode(folder), _ANYTHING) >= 0
    try:
        yield
        events = []
        while True:
            try:
                data = os.read(watch, 1 << 16)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                _, mask, _, length = struct.unpack_from("<iIII", data, at)
                events.append((data[at + 16 : at + 16 + length].rstrip(b"\0").decode(), hex(mask)))
                at += 16 + length
        assert not events
    finally:
        os.close(watch)


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    with ram_folder() as folder:
        yield make_sample(folder / "store")


def test_the_watch_sees_an_open(ram: Path) -> None:
    (ram / "file").write_text("x")
    with pytest.raises(AssertionError), untouched(ram):
        (ram / "file").read_text()


FILES = ["LOCK", "SUPER", "man/0.r", "man/0.m", "man/1.r", "seg/0", "seg/1", "wal/c-1", "wal/m-1", "wal/c-2", "wal/m-2"]


def real_name(store: Path, short: str) -> str:
    """`man/1.m` is the mirror of the second manifest, `wal/c-2` a copy of the second journal."""
    if "/" not in short:
        return short
    folder, name = short.split("/")
    names = sorted(file.name for file in (store / folder).iterdir())
    if folder == "wal":
        return f"wal/{name[0]}-0000000{name[2]}-00000000"
    if folder == "man":
        names = [n for n in names if n.endswith(".m") == name.endswith(".m")]
    return f"{folder}/{names[int(name[0])]}"


def check_outcomes(found: Outcomes) -> None:
    assert not unclean(found)


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("short", FILES)
def test_a_link_in_place_of_a_file(sample: Sample, ram: Path, short: str, dangling: bool) -> None:
    """The link leads to what the file was (or to nothing), so that to follow it would look right."""
    store = copied(sample.path, ram / "store")
    outside = ram / "outside"
    outside.mkdir()
    path = store / real_name(store, short)
    if dangling:
        path.unlink()
    else:
        path.rename(outside / "target")
    path.symlink_to(outside / "target")
    with untouched(outside):
        found = probe(store)
    check_outcomes(found)
    assert path.is_symlink() or not path.exists() or short == "LOCK"
    # One of two copies is in the way: that is a damaged copy, and no commit is lost.
    if short.startswith(("wal", "man")):
        assert found["open"][0] == found["load"][0] == "", found
        assert found["damage"][1], "the link is reported"
    if short.startswith("seg"):
        assert found["open"][0] == "", "older commits can be had"


@pytest.mark.parametrize("folder", ["wal", "man", "seg"])
def test_a_link_in_place_of_a_folder(sample: Sample, ram: Path, folder: str) -> None:
    store = copied(sample.path, ram / "store")
    outside = ram / "outside"
    (store / folder).rename(outside)
    (store / folder).symlink_to(outside)
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    with untouched(outside):
        found = probe(store)
    check_outcomes(found)
    assert before == {path.name: path.read_bytes() for path in outside.iterdir()}
    assert any("ELOOP" in text or "symbolic link" in text for _, text in found.values()), found


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
@pytest.mark.parametrize("short", FILES)
def test_something_else_in_place_of_a_file(sample: Sample, ram: Path, short: str, make: Callable[[Path], None]) -> None:
    """A pipe must not be waited for."""
    store = copied(sample.path, ram / "store")
    path = store / real_name(store, short)
    path.unlink()
    make(path)
    found = probe(store)
    check_outcomes(found)
    if short.startswith(("wal", "man")):
        assert found["open"][0] == found["load"][0] == "", found


def test_links_that_are_planted_beside_are_neither_followed_nor_kept_from_collection(sample: Sample, ram: Path) -> None:
    """Under names that a later writer, or a collection, would come to."""
    store = copied(sample.path, ram / "store")
    outside = ram / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"precious")
    for name in (
        "seg/00000003-000000000005.r0000.0000",
        "man/00000003-000000000005.r0000",
        "man/00000003-000000000005.r0000.m",
        "wal/c-00000003-00000001",
        "wal/m-00000003-00000001",
        "seg/00000001-00000000000f.r0000.0000",
        "man/00000001-00000000000f.r0000",
        "seg/00000001-000000000001.r0000.0001",
        "man/00000001-000000000002.r0000",
        "wal/c-00000000-00000000",
    ):
        (store / name).symlink_to(outside / "victim")
    with untouched(outside):
        found = probe(store)
    check_outcomes(found)
    assert (outside / "victim").read_bytes() == b"precious"
    assert found["load"][0] == ""


NOT_OURS = [
    "c-0000000g-00000000", "c-00000009", ".x", "x" * 200, "00000001-000000000001.r", "\n", "c-+0000001-0",
    "00000001-000000000001.r0000.0000.bak", "00000001-000000000009.r0000.0000~", "00000009-0000000000ff.r0000.000g",
    "0000000A-000000000001.r0000", "00000001-000000000001.r0000.M", "C-00000001-00000000", "c-00000001-00000000.old",
]  # fmt: skip


def test_names_that_are_not_ours_are_left_alone(sample: Sample, ram: Path) -> None:
    store = copied(sample.path, ram / "store")
    for folder in ("wal", "man", "seg"):
        for name in NOT_OURS:
            (store / folder / name).write_bytes(b"?")
    added = {file for file in files_of(store) if (store / file).read_bytes() == b"?"}
    assert len(added) == 3 * len(NOT_OURS)
    found = probe(store)
    assert {error for error, _ in found.values()} <= {"", "CommitNotFound"}, found
    assert not added - set(files_of(store)), "a file with any other name is ignored (section 2), and not removed"


# -- names in what is loaded

FILE = {"file": {"chunk": None, "mode": 0o644}}
BAD_NAMES = ["../x", "..", ".", "", "/etc/x", "a/b", "a\0b", "a/../../x"]


def folder(*entries: tuple[str, Any]) -> Any:
    return {"folder": {"entries": [list(entry) for entry in entries]}}


@pytest.mark.parametrize("document", [
    *(folder((name, FILE)) for name in BAD_NAMES),
    *(folder(("d", folder((name, FILE)))) for name in BAD_NAMES[:2]),
    *({"file": {"chunk": None, "mode": 0o644, "name": name}} for name in BAD_NAMES[:6]),
    folder(("l", {"link": "../../outside"})),
    folder(("l", {"link": "/etc/passwd"})),
    folder(("d", folder(("l", {"link": "../../x"})))),
    folder(("l", {"link": "m"}), ("m", {"link": "l"}), ("n", {"link": "l/../../x"})),
    folder(("x", FILE), ("x", {"link": ".."})),
], ids=lambda document: json.dumps(document)[:60])  # fmt: skip
def test_names_that_lead_out_of_a_folder(ram: Path, document: Any) -> None:
    """A store's own files are named by numbers alone: `File` and `Folder` values are the only names that it gives."""
    Forger(ram / "store").commit({}, {"d": {"f": document}}, meta=META)
    place = ram / "place"
    place.mkdir()
    with untouched(ram):
        try:
            value = tierload.load(ram / "store")["f"]  # type: ignore[index]
            value.save(place / "inside")
        except tierload.TierloadError:
            return
    assert all(path.resolve().is_relative_to(place) for path in place.rglob("*"))


# -- documents

DOCUMENTS: dict[str, str] = {
    "200,000 levels of arrays": "[" * 200_000 + "]" * 200_000,
    "200,000 levels that are not closed": "[" * 200_000,
    "3,000 levels of dicts": '{"d":{"a":' * 3000 + "1" + "}}" * 3000,
    "600 levels of tuples": '{"tuple":[' * 600 + "1" + "]}" * 600,
    "100 levels of sets": '{"frozenset":[' * 100 + "1" + "]}" * 100,
    "chunk 2^31": '{"t":{"chunk":2147483648,"shape":[1000]}}',
    "chunk -1": '{"t":{"chunk":-1,"shape":[1000]}}',
    "chunk true": '{"t":{"chunk":true,"shape":[1000]}}',
    "chunk 1e9": '{"t":{"chunk":1e9,"shape":[1000]}}',
    "a blob of a float chunk": '{"blob":{"chunk":0,"as":"bytes"}}',
    "a shape of 2^62": '{"t":{"chunk":0,"shape":[4611686018427387904]}}',
    "a shape of 2^62 by 0": '{"t":{"chunk":0,"shape":[4611686018427387904,4611686018427387904,0]}}',
    "a shape of -1": '{"t":{"chunk":0,"shape":[-1]}}',
    "a view beyond the chunk": '{"t":{"chunk":0,"shape":[1000],"stride":[1],"offset":1}}',
    "a view at 2^62": '{"t":{"chunk":0,"shape":[1],"stride":[1],"offset":4611686018427387904}}',
    "a stride of 2^62": '{"t":{"chunk":0,"shape":[2],"stride":[4611686018427387904],"offset":0}}',
    "a negative stride": '{"t":{"chunk":0,"shape":[2],"stride":[-1],"offset":1}}',
    "a view of larger items": '{"t":{"chunk":0,"shape":[1000],"stride":[1],"offset":0,"dtype":"complex128"}}',
    "1,000 dimensions": '{"t":{"chunk":0,"shape":[' + ",".join(["1"] * 1000) + "]}}",
    "a member twice": '{"d":{"a":1,"a":2}}',
    "a reference to nothing": '[{"ref":7}]',
    "a reference to itself": '[{"ref":0}]',
    "a bomb of references": "[[1]," + ",".join(f'[{{"ref":{n}}},{{"ref":{n}}}]' for n in range(1, 60)) + "]",
    "an int of 100,000 digits": '{"int":"0x' + "f" * 100_000 + '"}',
    "a number of 100,000 digits": "1" * 100_000,
    "a range of 2^80": '{"range":[0,1208925819614629174706176,1]}',
    "an array of 2^62 items": '{"ndarray":{"chunk":0,"dtype":"<f8","shape":[4611686018427387904],"order":"C"}}',
    "an array of objects": '{"ndarray":{"chunk":0,"dtype":"|O","shape":[500],"order":"C"}}',
    "a scalar of 2^31 bytes": '{"npscalar":{"dtype":"|S2147483647","data":"AAAA"}}',
    "a pickle": '{"pickle":"gASVHgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAN4eHiUhZRSlC4="}',
    "a type that is imported": '{"data":{"type":"antigravity:x","fields":[]}}',
    "an enum of os": '{"enum":{"type":"os:system","name":"x","value":1}}',
    "a device that is none": '{"device":"quantum:7"}',
    "a zone that is a path": '{"datetime":"2020-01-01T00:00:00+00:00[../../../etc/passwd]"}',
    "an unknown tag": '{"future":1}',
    "a generator of another kind": '{"rng":{"kind":"all","V":{}}}',
    "a deque of -1": '{"deque":{"items":[],"maxlen":-1}}',
    "version 2 of the document": "",
}
VALUES_ARE_FINE = {
    "an int of 100,000 digits", "a bomb of references", "a type that is imported", "an enum of os", "a range of 2^80",
    "a shape of 2^62 by 0", "a reference to itself", "1,000 dimensions", "600 levels of tuples",
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_lies(ram: Path, name: str) -> None:
    text = f'{{"version":1,"root":{DOCUMENTS[name]}}}' if DOCUMENTS[name] else '{"version":2,"root":1}'
    builder = Forger(ram / "store")
    simple(builder, 1, step=1, meta=META)
    chunk = Chunk("float32", (1000,), np.arange(1000, dtype=np.float32).tobytes())
    builder.commit({"a": chunk}, None, step=2, meta=META, document=text)
    found = probe(ram / "store")
    assert not unclean(found)
    allowed = {"CorruptStore", "UnsupportedValue", "UnsupportedFormat"} | ({""} if name in VALUES_ARE_FINE else set())
    assert found["load"][0] in allowed, found["load"]
    assert found["load 1"][0] == ""
    assert "antigravity" not in __import__("sys").modules
