"""B28: a disk that is full or fails in the middle of a save; B33: permissions of what a save makes."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, state_of, unreferenced
from tests.store.support import in_child
from tierload import Store, StoreIOError, _native

CLONE_NEWNS = 0x20000


def failure_of(call: Callable[[], object]) -> StoreIOError:
    """The error of a save, without the frames that it came through (a test of its own says why)."""
    try:
        call()
    except StoreIOError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    pytest.fail("nothing has failed")


def mounted_small(path: Path, mib: int) -> None:
    """In a child: a tmpfs of some MiB at ``path``, in a mount namespace of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise PermissionError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(path)], check=True, capture_output=True)


def test_b28_a_state_that_does_not_fit(tmp_path: Path) -> None:
    """100 MiB of tmpfs, one older checkpoint in it, and 150 MiB of noise to save."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")

    def body() -> dict[str, Any]:
        mounted_small(tmp_path, 100)
        path = tmp_path / "store"
        tierload.save(state_of(1), path, step=1)
        noise = torch.randint(-(2**62), 2**62, (150 << 17,))
        error = failure_of(lambda: tierload.save({"noise": noise}, path, step=2))
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        assert_is(tierload.load(path), 1)
        tierload.save(state_of(3), path, step=3)
        assert_is(tierload.load(path), 3)
        assert_is(tierload.load(path, step=1), 1)
        let_go(tmp_path)
        with tierload.open(path) as store:
            assert [commit.step for commit in store.commits()] == [3, 1]
            assert store.verify(full=True).ok
        left = unreferenced(path)
        return {"text": str(error), "errno": error.errno, "free": free, "left": left}

    outcome = in_child(body, seconds=100)
    if outcome.error in ("PermissionError", "CalledProcessError"):
        pytest.skip(f"cannot mount a tmpfs here: {outcome.message}")
    assert not outcome.error, outcome.trace
    assert outcome.value["errno"] == errno.ENOSPC
    text = outcome.value["text"]
    assert str(tmp_path / "store") in text
    assert f"{150 << 20:,} bytes" in text, "needed"
    assert "are free now" in text
    assert "gc" in text, "what to do"
    assert outcome.value["free"] > 95 << 20, "what had been written is gone"
    assert not outcome.value["left"]


@pytest.mark.parametrize(
    ("op", "at", "code"),
    [
        ("write", 3, errno.EIO),
        ("write", 1, errno.ENOSPC),
        ("write", 2, errno.EDQUOT),
        ("create", 1, errno.ENOSPC),
        ("sync", 1, errno.ENOSPC),
        ("sync", 3, errno.EIO),
        ("sync_dir", 1, errno.ENOSPC),
    ],
)
def test_b28_one_failed_call(store: Path, op: str, at: int, code: int) -> None:
    """What was there stays, the message names the file and the cause, nothing is left, and the next save works."""
    faults = _native.Faults()
    with Store(store, mode="w", settings=SMALL, _faults=faults) as held:
        held.save(state_of(1), step=1)
        faults.arm(at=at, kind="fail", code=code, op=op)
        error = failure_of(lambda: held.save(state_of(2), step=2))
        assert faults.hit
        assert error.errno == code
        assert str(store) in (error.filename or "")
        assert os.strerror(code) in str(error)
        assert_is(held.load(), 1)
        if code in (errno.ENOSPC, errno.EDQUOT) and op in ("write", "create"):
            assert "are free now" in str(error)
            held.save(state_of(3), step=3)  # space was made meanwhile
            assert_is(held.load(), 3)
    tierload.save(state_of(4), store, step=4)
    assert_is(tierload.load(store), 4)
    tierload.open(store, mode="w").collect()
    assert not unreferenced(store)
    assert tierload.open(store).verify(full=True).ok


def failing_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, _native.Faults]:
    """What ``tierload.save`` will use for ``path``, with a state of number 1 in it."""
    faults = _native.Faults()
    held = Store(path, mode="w", settings=SMALL, _faults=faults)
    monkeypatch.setitem(tierload.api._writers, os.path.realpath(path), held)
    tierload.save(state_of(1), path, step=1)
    return held, faults


def test_b28_training_can_go_on(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tierload.save`` after a failure that poisoned the writer: it opens the store anew by itself."""
    held, faults = failing_writer(store, monkeypatch)
    faults.arm(at=1, kind="fail", code=errno.EIO, op="sync")
    failure_of(lambda: tierload.save(state_of(2), store, step=2))
    assert held.closed
    assert_is(tierload.load(store), 1)
    tierload.save(state_of(3), store, step=3)
    assert_is(tierload.load(store), 3)
    assert_is(tierload.load(store, step=1), 1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_b28_trying_again_at_once(store: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """In the handler of the first failure, as a script does it: the error and all its frames are still alive there."""
    _, faults = failing_writer(store, monkeypatch)
    faults.arm(at=1, kind="fail", code=code, op="write")
    try:
        tierload.save(state_of(2), store, step=2)
        pytest.fail("nothing has failed")
    except StoreIOError:
        tierload.save(state_of(2), store, step=2)
    assert_is(tierload.load(store), 2)


# -- B33


def modes(path: Path) -> dict[str, int]:
    """Permission bits of everything in a store, with the store itself as ``.``."""
    return {str(p.relative_to(path)): p.stat().st_mode & 0o7777 for p in [path, *path.rglob("*")]}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027, 0o077])
def test_b33_umask(store: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        tierload.save(state_of(1), store, step=1, settings=SMALL)
        tierload.save(state_of(2), store, step=2)
        tierload.open(store, mode="w").collect(keep=1)
    finally:
        os.umask(before)
    for name, mode in modes(store).items():
        whole = 0o777 if (store / name).is_dir() else 0o666
        assert mode == whole & ~umask, f"{name} has {mode:o}"


def test_b33_modes_that_somebody_set_stay(store: Path) -> None:
    tierload.save(state_of(1), store, step=1, settings=SMALL)
    let_go(store)
    (store / "SUPER").chmod(0o640)
    (store / "LOCK").chmod(0o660)
    (store / "seg").chmod(0o2750)
    tierload.save(state_of(2), store, step=2)
    found = modes(store)
    assert (found["SUPER"], found["LOCK"], found["seg"]) == (0o640, 0o660, 0o2750)


def test_b33_setgid_is_inherited(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to any group")
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, -1, 12345)
    shared.chmod(0o2775)
    tierload.save(state_of(1), shared / "store", settings=SMALL)
    let_go(tmp_path)
    for name, mode in modes(shared / "store").items():
        path = shared / "store" / name
        assert path.stat().st_gid == 12345, name
        assert not path.is_dir() or mode & 0o2000, f"{name} has {mode:o}"


def test_b33_a_default_acl_is_inherited(tmp_path: Path) -> None:
    """user::rwx, group::r-x, group 12345: rwx, mask rwx, other nothing; umask does not count then."""
    shared = tmp_path / "shared"
    shared.mkdir()
    entries = [(0x01, 7, -1), (0x04, 5, -1), (0x08, 7, 12345), (0x10, 7, -1), (0x20, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(shared, "system.posix_acl_default", acl)
    except OSError as error:
        pytest.skip(f"no ACLs on this file system: {error}")
    tierload.save(state_of(1), shared / "store", settings=SMALL)
    let_go(tmp_path)
    for name, mode in modes(shared / "store").items():
        path = shared / "store" / name
        assert b"\x08\x00\x07\x00" + struct.pack("<I", 12345) in os.getxattr(path, "system.posix_acl_access"), name
        assert mode == (0o770 if path.is_dir() else 0o660), f"{name} has {mode:o}"
