"""Locked memory: as much as the limit allows, in the given order, by what the kernel itself counts (VmLck)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
import platform
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tierload import _native
from tierload.errors import InvalidRequest
from tierload.tiers.locking import MemoryLock, lock_memory, unlock_memory

PAGE = mmap.PAGESIZE


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def status_of(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def locked_now() -> int:
    return status_of("VmLck") << 10


def may_lock(nbytes: int) -> bool:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return soft == resource.RLIM_INFINITY or soft - locked_now() >= nbytes


def limited(pages: int, check: Callable[[], None]) -> None:
    """Runs a check in a child that may lock so many pages, and has no capabilities."""

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (pages * PAGE, pages * PAGE))
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)  # gives up all capabilities
        check()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0  # else its traceback is on stderr


def test_pages_are_locked_and_not_touched() -> None:
    if not may_lock(256 * PAGE):
        pytest.skip("the memlock limit is lower than what this test locks")
    memory = mmap.mmap(-1, 256 * PAGE)
    start, before, resident = address_of(memory), locked_now(), status_of("VmRSS")
    # Neighbours, one within another, one twice: 8 pages and then 200.
    addresses = [start + 10, start + PAGE + 5, start + PAGE, start + 20 * PAGE, start + 20 * PAGE]
    lengths = [PAGE, 7 * PAGE - 5, 10, 200 * PAGE, 0]
    found = lock_memory(addresses, lengths)
    assert (found.locked_bytes, found.refused_bytes, found.reason, found.placing) == (208 * PAGE, 0, "", "")
    assert locked_now() - before == 208 * PAGE
    if found.method == "mlock2":
        assert status_of("VmRSS") - resident < 100 * PAGE >> 10
    assert unlock_memory(addresses, lengths) == MemoryLock(208 * PAGE, 0, "", "", "")
    assert locked_now() == before
    memory.close()


def test_the_first_that_fit_are_locked() -> None:
    limited(16, first_that_fit)


def first_that_fit() -> None:
    memory = mmap.mmap(-1, 64 * PAGE)
    start = address_of(memory)
    addresses, lengths = [start + at * PAGE for at in (40, 8, 38, 0)], [count * PAGE for count in (10, 1, 4, 30)]
    found = lock_memory(addresses, lengths)
    assert found.locked_bytes == locked_now() == 16 * PAGE
    assert found.refused_bytes == (10 + 1 + 2 + 29 - 16) * PAGE
    limit = f"the memlock limit of this process, {16 * PAGE >> 10} KiB, is reached: raise it (`ulimit -l`"
    assert found.reason.startswith(limit)
    unlock_memory(addresses[:1], lengths[:1])
    assert locked_now() == 6 * PAGE  # the second, the third, and the first 3 pages of the last
    unlock_memory([start], [64 * PAGE])
    assert locked_now() == 0
    lock_memory([start], [12 * PAGE])
    more = lock_memory([start + 32 * PAGE], [12 * PAGE])
    assert (more.locked_bytes, more.refused_bytes, locked_now()) == (4 * PAGE, 8 * PAGE, 16 * PAGE)
    assert f"({12 * PAGE >> 10} KiB were locked before)" in more.reason


def test_a_process_that_may_lock_nothing_is_told() -> None:
    limited(0, nothing_fits)


def nothing_fits() -> None:
    memory = mmap.mmap(-1, 4 * PAGE)
    found = lock_memory([address_of(memory)], [4 * PAGE])
    assert (found.locked_bytes, found.refused_bytes, found.method) == (0, 4 * PAGE, "")
    assert "memlock limit of this process, 0 KiB, is reached" in found.reason


MLOCK, MBIND, MLOCK2 = 149, 237, 325  # system calls of x86-64


def forbid(calls: dict[int, int]) -> None:
    """From now on these system calls of this process fail with an errno, as in a sandbox."""
    rules = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # the number of the call
    for number, code in calls.items():
        rules += [struct.pack("HBBI", 0x15, 0, 1, number), struct.pack("HBBI", 0x06, 0, 0, 0x50000 | code)]
    rules.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # all others are allowed
    text = ctypes.create_string_buffer(b"".join(rules))
    program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls are numbered for x86-64")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_sandbox_without_these_calls_is_no_failure(code: int) -> None:
    def check() -> None:
        memory = mmap.mmap(-1, 8 * PAGE)
        column, length = np.array([address_of(memory)], np.uint64), np.array([8 * PAGE], np.uint64)
        forbid({MLOCK2: code, MBIND: code})
        report = _native.lock_memory(column, length, 0)
        assert (report.locked, report.method, report.reason) == (8 * PAGE, "mlock", "")
        assert report.placing == f"memory could not be given to node 0: {os.strerror(code)}"
        assert locked_now() == 8 * PAGE
        forbid({MLOCK: code})
        assert lock_memory(column, length).refused_bytes == 8 * PAGE
        assert "sandbox" in lock_memory(column, length).reason

    limited(16, check)


def test_memory_that_is_gone_is_no_failure() -> None:
    memory = mmap.mmap(-1, 2 * PAGE)
    start = address_of(memory)
    memory.close()
    found = lock_memory([start], [2 * PAGE])
    assert (found.locked_bytes, found.refused_bytes) == (0, 2 * PAGE)
    assert "memory is not mapped" in found.reason or "memlock limit" in found.reason
    assert unlock_memory([start], [2 * PAGE]).reason == "memory is not mapped any more"


def test_a_node_is_asked_for_and_one_that_is_not_there_is_no_failure() -> None:
    memory = mmap.mmap(-1, PAGE)
    column, length = np.array([address_of(memory)], np.uint64), np.array([PAGE], np.uint64)
    for node in (0, 1000):
        report = _native.lock_memory(column, length, node)
        assert report.locked + report.refused == PAGE
        if node:
            assert report.placing.startswith("memory could not be given to node 1000: ")
        elif os.path.exists("/sys/devices/system/node/node0") and not report.placing:
            assert "prefer:0" in next(
                line
                for line in Path("/proc/self/numa_maps").read_text().splitlines()
                if line.startswith(f"{column[0]:08x}")
            )
    _native.unlock_memory(column, length)


def test_regions_that_make_no_sense_are_refused_before_any_is_locked() -> None:
    memory = mmap.mmap(-1, PAGE)
    before = locked_now()
    with pytest.raises(InvalidRequest, match="beyond the end of memory"):
        lock_memory([address_of(memory), 2**64 - 10], [PAGE, 100])
    with pytest.raises(InvalidRequest, match="2 addresses have 1 lengths"):
        lock_memory([1, 2], [1])
    assert locked_now() == before
