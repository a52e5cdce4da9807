"""B27: what a save has told the file system when it returns. That this is enough is proven in tests/crash."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import tierload
from tests.cases.children import script, strace
from tests.cases.stores import assert_is

CALLS = (
    "openat pwritev pwrite64 write writev fdatasync fsync unlink unlinkat rename renameat renameat2 ftruncate".split()
)


@dataclass(frozen=True)
class Call:
    name: str
    path: str  # inside the store; "" is the store's own directory
    created: bool = False


def parse(trace: str, store: Path) -> list[list[Call]]:
    """The calls on files of the store during each save."""
    saves: list[list[Call]] = []
    inside = False
    for line in trace.splitlines():
        if 'SAVE\\n"' in line:
            saves.append([])
        if "SAVED" in line or 'SAVE\\n"' in line:
            inside = 'SAVE\\n"' in line
            continue
        # [pid] fdatasync(5</path>) = 0    and    openat(3</dir>, "name", FLAGS) = 4</path>
        found = re.search(r"(\w+)\((?:\w+)<([^>]*)>(.*)\)\s+= (?:(-?\d+)(?:<([^>]*)>)?)", line)
        if not inside or not found or int(found[4]) < 0:
            continue
        name, path = found[1], found[5] or found[2]
        if path == str(store) or path.startswith(f"{store}/"):
            saves[-1].append(Call(name, path[len(str(store)) + 1 :], "O_CREAT" in found[3]))
    return saves


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> list[list[Call]]:
    folder = tmp_path_factory.mktemp("traced").resolve()
    log = folder / "trace"
    under = strace(log, CALLS)
    script("script_save", folder / "store", 3, under=under, PYTHONDONTWRITEBYTECODE="1")
    assert_is(tierload.load(folder / "store"), 3)
    saves = parse(log.read_text(), folder / "store")
    assert len(saves) == 3
    return saves


def places(calls: list[Call], names: str, prefix: str) -> list[int]:
    return [n for n, c in enumerate(calls) if re.fullmatch(names, c.name) and c.path.startswith(prefix)]


WRITES = "p?write(v|64)?"


@pytest.mark.parametrize("number", [1, 2])
def test_b27_everything_is_synced_before_the_commit_is_written(traced: list[list[Call]], number: int) -> None:
    """The second and third save: the first one also makes the store."""
    calls = traced[number]
    commits = places(calls, WRITES, "wal/")
    assert len(commits) == 2, "COMMIT into the journal and its mirror"
    created = {c.path for c in calls if c.created}
    assert {name[:4] for name in created} == {"seg/", "man/"}
    for name in created:
        written, synced = places(calls, WRITES, name), places(calls, "fdatasync|fsync", name)
        assert written, f"{name} is empty"
        assert synced, f"{name} is never synced"
        assert max(written) < max(synced) < min(commits), f"{name} is not durable before COMMIT is written"
        made = next(n for n, c in enumerate(calls) if c.created and c.path == name)
        entered = [n for n, c in enumerate(calls) if c.name == "fsync" and c.path == name[:3] and n < min(commits)]
        assert entered, f"{name[:3]}/ is never synced"
        assert made < max(entered), f"the name of {name} is not durable"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_b27_both_journals_are_synced_before_a_save_returns(traced: list[list[Call]], number: int) -> None:
    calls = traced[number]
    journals = {c.path for c in calls if c.path.startswith("wal/") and re.fullmatch(WRITES, c.name)}
    assert {name[4] for name in journals} == {"c", "m"}
    for name in journals:
        assert max(places(calls, WRITES, name)) < max(places(calls, "fdatasync|fsync", name))


def test_b27_a_new_store_is_durable_with_its_names(traced: list[list[Call]]) -> None:
    calls = traced[0]
    names = {c.path: n for n, c in enumerate(calls) if c.created}
    for name, made in names.items():
        folder = name.rpartition("/")[0]
        synced = [n for n, c in enumerate(calls) if c.name == "fsync" and c.path == folder]
        assert synced, f"{folder or 'the store'}/ is never synced"
        assert name == "LOCK" or max(synced) > made, f"the name of {name} is not durable"
    # SUPER names the journal after the journal is durable.
    base = max(places(calls, WRITES, "SUPER"))
    for copy in "cm":
        header = min(places(calls, WRITES, f"wal/{copy}"))
        assert any(header < n < base for n in places(calls, "fdatasync|fsync", f"wal/{copy}"))
    assert base < max(places(calls, "fdatasync|fsync", "SUPER"))


def test_b27_nothing_is_renamed_or_written_twice(traced: list[list[Call]]) -> None:
    for calls in traced:
        assert not [c for c in calls if c.name.startswith("rename")]
        for name in {c.path for c in calls if c.created and c.path.startswith(("seg/", "man/"))}:
            synced = places(calls, "fdatasync|fsync", name)
            assert not [n for n in places(calls, WRITES, name) if n > synced[0]]
