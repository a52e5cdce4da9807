"""A fault at every storage call of every operation: what was there stays whole, what is new is whole or absent.

`_native.Faults` counts the calls of an operation, and then makes each of them fail in turn, in every way it can. The
judge is a fresh store without faults.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.state.alike import assert_alike
from tests.store.ondisk import files_of
from tests.store.support import SMALL, Sample, catalog_of, copied, make_sample, ram_folder, writer
from tierload import Store, StoreIOError, StorePoisoned, TierloadError, _native

EIO, ENOSPC, EDQUOT = errno.EIO, errno.ENOSPC, errno.EDQUOT
OUT_OF_SPACE = (ENOSPC, EDQUOT)

FAULTS: dict[str, list[tuple[str, int]]] = {
    "write": [(kind, code) for kind in ("fail", "partial") for code in (EIO, ENOSPC, EDQUOT)] + [("fail_after", EIO)],
    "sync": [("fail", EIO), ("fail", ENOSPC), ("fail_after", EIO), ("lie", 0)],
    "sync_dir": [("fail", EIO), ("fail_after", EIO), ("lie", 0)],
    "create": [("fail", EIO), ("fail", ENOSPC), ("fail", EDQUOT), ("fail", errno.EMFILE), ("fail_after", EIO)],
    "open": [("fail", EIO), ("fail", errno.EMFILE)],
    "remove": [("fail", EIO), ("fail_after", EIO)],
    "truncate": [("fail", EIO), ("fail_after", EIO)],
    "make_dir": [("fail", EIO), ("fail", ENOSPC), ("fail_after", EIO)],
    "punch": [("fail", EIO), ("fail_after", EIO)],
    "lock": [("fail", EIO), ("fail", errno.ENOLCK)],
    "map": [("fail", EIO), ("fail", errno.ENOMEM)],
} | {call: [("fail", EIO)] for call in ("read", "list", "size", "linked", "free_bytes", "allocated")}

NEW_STATE = {"w": torch.arange(3000, dtype=torch.float32), "b": torch.arange(30), "step": 7}


@dataclass(frozen=True)
class Operation:
    """What is done, and how to tell from a fresh store that it was."""

    run: Callable[[Store], object]
    done: Callable[[Store, Sample], bool]
    drops: bool = False


def saved(store: Store, sample: Sample) -> bool:
    """Whether the new commit is there: then it is whole."""
    found = [commit for commit in store.commits() if commit.step == 7]
    for commit in found:
        assert_alike(store.load(commit=commit), NEW_STATE)
        assert commit.head
        assert commit.tags == ("new",)
    assert ("new" in store.tags()) == bool(found), "commit and tag are one group"
    return bool(found)


def rolled_back(store: Store, sample: Sample) -> bool:
    head = store.head()
    assert head is not None
    if head.id == sample.head:
        return False
    assert head.source == sample.order[0]
    assert store.recorded() == {}, "values go back with the commit"
    assert_alike(store.load(), sample.contents[sample.order[0]])
    return True


OPERATIONS: dict[str, Operation] = {
    "save": Operation(lambda store: store.save(NEW_STATE, step=7, tags=("new",)), saved),
    "record": Operation(lambda store: store.record("lr", 9.5), lambda store, _: store.recorded()["lr"] == 9.5),
    # More than the journal has room for, so that it grows first.
    "large record": Operation(
        lambda store: store.record("text", "x" * 90_000), lambda store, _: store.recorded().get("text") == "x" * 90_000
    ),
    "tag": Operation(lambda store: store.tag("second", 2), lambda store, _: "second" in store.tags()),
    "rollback": Operation(lambda store: store.rollback("first"), rolled_back),
    "collect": Operation(lambda store: store.collect(keep=1), lambda store, _: len(store.commits()) == 2, drops=True),
}


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    with ram_folder() as folder:
        yield make_sample(folder / "store")


def calls_of(path: Path, operation: Operation, call: str) -> int:
    """How many storage calls of one name an operation makes."""
    faults = _native.Faults()
    with writer(path, _faults=faults) as store:
        faults.arm(at=0, op=call)
        operation.run(store)
        return int(faults.calls)


def assert_earlier_whole(path: Path, sample: Sample, operation: Operation) -> bool:
    """Everything that was there is; returns whether the operation shows."""
    with tierload.open(path, settings=SMALL) as store:
        there = {commit.id for commit in store.commits()}
        gone = set(sample.order) - there
        assert gone <= (set(sample.order[1:3]) if operation.drops else set()), f"lost {gone}"
        for commit in sample.order:
            if commit in there:
                assert_alike(store.load(commit=commit), sample.contents[commit])
        assert store.tags()["first"].id == sample.order[0]
        # A copy that a failed write left behind its mirror may be reported; a commit or a page may not.
        assert not [damage for damage in store.verify(full=True).damages if damage.commits]
        return operation.done(store, sample)


def check_error(error: BaseException, path: Path, code: int, call: str) -> None:
    """The error says what failed, on which path, and why."""
    assert isinstance(error, StoreIOError), repr(error)
    assert error.errno == code
    assert str(error.filename).startswith(str(path)), error.filename
    assert call in str(error), str(error)
    assert os.strerror(code) in str(error)


def is_poison(call: str, code: int) -> bool:
    """Which faults leave the disk in doubt: any failed sync, and a write that failed for another reason than space."""
    return call in ("sync", "sync_dir") or (call == "write" and code not in OUT_OF_SPACE)


def is_poisoned(store: Store) -> bool:
    try:
        store.record("probe", 1)
    except StorePoisoned:
        return True
    return False


def after_failure(store: Store, path: Path, call: str, code: int, files: set[str], name: str, failed: str) -> None:
    """The same writer acknowledges nothing more when the disk is in doubt; after a full disk it goes on."""
    # Space for a group was made before, so that a lack of it amid the group is as much a doubt as any other failure.
    if is_poison(call, code) or ("/wal/" in failed and is_poisoned(store)):
        for attempt in (lambda: store.save(NEW_STATE), lambda: store.record("x", 1), lambda: store.tag("y", "first")):
            with pytest.raises(StorePoisoned):
                attempt()
    elif code in OUT_OF_SPACE and name == "save":
        assert set(files_of(path)) == files, "partial files are gone"
        store.save({"again": torch.ones(9)}, step=8)
        assert_alike(store.load(step=8), {"again": torch.ones(9)})


@pytest.mark.parametrize("call", FAULTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_at_every_call(sample: Sample, ram: Path, name: str, call: str) -> None:
    operation, copy = OPERATIONS[name], ram / "copy"
    calls = calls_of(copied(sample.path, copy), operation, call)
    problems = []
    for at in range(1, calls + 1):
        for kind, code in FAULTS[call]:
            try:
                one_fault(copied(sample.path, copy), sample, operation, name, call, at, kind, code)
            except (AssertionError, TierloadError, pytest.fail.Exception) as error:
                problems.append(f"{kind} {errno.errorcode.get(code, '')} at {call} {at} of {calls}: {error!r:.300}")
    assert not problems, "\n".join(problems)


def one_fault(
    path: Path, sample: Sample, operation: Operation, name: str, call: str, at: int, kind: str, code: int
) -> None:
    faults = _native.Faults()
    failed: str | None = None
    with writer(path, _faults=faults) as store:
        files = set(files_of(path))
        faults.arm(at=at, kind=kind, code=code, op=call)
        try:
            operation.run(store)
        except TierloadError as error:
            check_error(error, path, code, call)
            failed = str(error.filename)  # type: ignore[attr-defined]
        assert faults.hit, "the fault never happened"
        faults.disarm()
        done = assert_earlier_whole(path, sample, operation)
        assert done or failed is not None, "acknowledged, and not there"
        if failed is not None:
            after_failure(store, path, call, code, files, name, failed)
    with tierload.open(path, settings=SMALL) as store:
        before = catalog_of(store._native)
    with writer(path) as store:
        assert catalog_of(store._native) == before, "a commit comes or goes by opening"
        store.save({"last": torch.ones(5)}, step=99)
        assert_alike(store.load(), {"last": torch.ones(5)})
    assert_earlier_whole(path, sample, Operation(operation.run, lambda *_: True, operation.drops))


def test_every_operation_meets_the_calls_that_matter(sample: Sample, ram: Path) -> None:
    """Else the tests above would pass for want of calls."""
    counts = {
        name: {call: calls_of(copied(sample.path, ram / "copy"), operation, call) for call in FAULTS}
        for name, operation in OPERATIONS.items()
    }
    for name in OPERATIONS:
        assert counts[name]["write"] >= 2
        assert counts[name]["sync"] >= 2
    assert counts["save"]["create"] >= 3
    assert counts["save"]["sync_dir"] == 2
    assert counts["collect"]["remove"] >= 1


# -- opening


def open_writer(path: Path, faults: Any) -> None:
    writer(path, _faults=faults).close()


def open_reader(path: Path, faults: Any) -> None:
    with Store(path, mode="r", settings=SMALL, _faults=faults) as store:
        store.load()
        store.verify(full=True)


@pytest.mark.parametrize("call", FAULTS)
@pytest.mark.parametrize("opening", [open_writer, open_reader])
def test_a_fault_at_every_call_of_opening(
    sample: Sample, ram: Path, opening: Callable[[Path, Any], None], call: str
) -> None:
    """Whatever fails, the next opening finds everything; and again, after that one failed in the same place."""
    copy = ram / "copy"
    faults = _native.Faults()
    faults.arm(at=0, op=call)
    opening(copied(sample.path, copy), faults)
    problems = []
    for at in range(1, int(faults.calls) + 1):
        for kind, code in FAULTS[call]:
            copied(sample.path, copy)
            try:
                for _ in range(2):
                    broken = _native.Faults()
                    broken.arm(at=at, kind=kind, code=code, op=call)
                    try:
                        opening(copy, broken)
                    except TierloadError as error:
                        if isinstance(error, StoreIOError):
                            check_error(error, copy, code, call)
                    assert_earlier_whole(copy, sample, OPERATIONS["tag"])
                with writer(copy) as store:
                    assert catalog_of(store._native) == sample.catalog
                    store.save({"last": torch.ones(5)}, step=99)
                assert_earlier_whole(copy, sample, OPERATIONS["tag"])
            except (AssertionError, TierloadError) as error:
                problems.append(f"{kind} {errno.errorcode.get(code, '')} at {call} {at}: {error!r:.300}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("call", FAULTS)
def test_a_fault_at_every_call_of_creating_a_store(ram: Path, call: str) -> None:
    """The next attempt finds an empty store, or makes one."""
    faults = _native.Faults()
    faults.arm(at=0, op=call)
    open_writer(ram / "first", faults)
    problems = []
    for at in range(1, int(faults.calls) + 1):
        for kind, code in FAULTS[call]:
            path = ram / f"{at} {kind} {code}"
            broken = _native.Faults()
            broken.arm(at=at, kind=kind, code=code, op=call)
            try:
                try:
                    open_writer(path, broken)
                except StoreIOError as error:
                    check_error(error, path, code, call)
                with writer(path) as store:
                    store.save(NEW_STATE, step=7)
                assert_alike(tierload.load(path), NEW_STATE)
                assert tierload.open(path).verify(full=True).ok
            except (AssertionError, TierloadError) as error:
                problems.append(f"{kind} {errno.errorcode.get(code, '')} at {call} {at}: {error!r:.300}")
    assert not problems, "\n".join(problems)
