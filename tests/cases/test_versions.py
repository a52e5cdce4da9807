"""B67: stores of a newer format say which release they need; what is optional in them is ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, state_of
from tests.cases.test_hostile_stores import PAGES, build, put, put_header
from tests.store.ondisk import patched
from tierload import UnsupportedFormat


def change_super(path: Path, offset: int, form: str, value: int | bytes) -> None:
    """Change a field in both slots, as a newer release would have written them."""
    data = (path / "SUPER").read_bytes()
    (path / "SUPER").write_bytes(b"".join(patched(data[at : at + 4096], offset, form, value) for at in (0, 4096)))


def change_journals(path: Path, offset: int, form: str, value: int) -> None:
    for journal in (path / "wal").iterdir():
        data = journal.read_bytes()
        journal.write_bytes(patched(data[:4096], offset, form, value) + data[4096:])


@pytest.fixture
def saved(store: Path) -> Path:
    tierload.save(state_of(1), store, step=1, settings=SMALL)
    let_go(store)
    return store


@pytest.mark.parametrize(("offset", "form", "value"), [(8, "<I", 2), (8, "<I", 99), (24, "<Q", 2), (24, "<Q", 1 << 63)])
def test_b67_a_newer_store_says_which_release_it_needs(saved: Path, offset: int, form: str, value: int) -> None:
    change_super(saved, 80, "<16s", b"7.5.3")
    change_super(saved, offset, form, value)
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    for use in (
        lambda: tierload.load(saved),
        lambda: tierload.open(saved),
        lambda: tierload.save(state_of(2), saved),
        lambda: tierload.rollback(saved, 1),
        lambda: tierload.open(saved, mode="w"),
    ):
        with pytest.raises(UnsupportedFormat, match=r"needs tierload >= 7\.5\.3") as found:
            use()
        assert str(saved) in str(found.value)
    after = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file() and path.name != "LOCK"}
    assert all(before[path] == data for path, data in after.items())


@pytest.mark.parametrize(("offset", "form"), [(8, "<I"), (24, "<Q")])
def test_b67_a_newer_journal(saved: Path, offset: int, form: str) -> None:
    change_journals(saved, offset, form, 2)
    for use in (lambda: tierload.load(saved), lambda: tierload.save(state_of(2), saved)):
        with pytest.raises(UnsupportedFormat, match=r"wal/.*version"):
            use()


def test_b67_unknown_optional_features_are_ignored(saved: Path) -> None:
    change_super(saved, 16, "<Q", 2**64 - 1)
    change_journals(saved, 16, "<Q", 2**64 - 1)
    assert_is(tierload.load(saved), 1)
    tierload.save(state_of(2), saved, step=2)
    let_go(saved)
    assert_is(tierload.load(saved), 2)
    assert tierload.open(saved).verify(full=True).ok


@pytest.mark.parametrize(
    ("tamper", "loads"),
    [
        (put_header(8, "<I", 2), False),
        (put_header(32, "<Q", 1), False),
        (put_header(24, "<Q", 2**64 - 1), True),
        (put(PAGES, 0, 54, "<H", 500), True),  # heat
    ],
)
def test_b67_newer_manifests(ram: Path, tamper: Callable[[bytearray], None], loads: bool) -> None:
    path = build(ram / "store", tamper)
    if loads:
        assert len(tierload.load(path)) == 2
    else:
        with pytest.raises(UnsupportedFormat, match=r"man/.*newer tierload|needs tierload >="):
            tierload.load(path)


def test_b67_newer_documents(ram: Path) -> None:
    for text in ('{"version":2,"root":1}', '{"version":1,"root":{"hologram":1}}'):
        path = build(ram / str(len(text)), document=text)
        with pytest.raises(tierload.TierloadError, match=r"newer|version|hologram"):
            tierload.load(path)
