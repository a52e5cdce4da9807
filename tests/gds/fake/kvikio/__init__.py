"""kvikio as far as tierload uses it, with the signatures of 26.10, over memory of the host.

A task runs in a thread of its own, late enough that whoever does not wait for it is seen; ``log`` has what happened.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kvikio import defaults

__version__ = "26.10.00"

log: list[tuple[Any, ...]] = []
late_s = 0.002
on_task: Callable[[str, int, int], int | None] | None = None
"""Called with the kind, offset and bytes of a task instead of moving them, where it returns how many it "moved"."""


class CompatMode(enum.IntEnum):
    OFF = 0
    ON = 1
    AUTO = 2


class IOFuture:
    def __init__(self, body: Callable[[], int]) -> None:
        self._result: int | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(body,))
        self._thread.start()

    def _run(self, body: Callable[[], int]) -> None:
        try:
            self._result = body()
        except Exception as error:  # noqa: BLE001 - get() raises it
            self._result = error

    def get(self) -> int:
        self._thread.join()
        result, self._result = self._result, None
        if result is None:
            raise RuntimeError("std::future_error: No associated state")
        if isinstance(result, Exception):
            raise result
        return result


class CuFile:
    def __init__(self, file: str, flags: str = "r") -> None:
        modes = {"r": os.O_RDONLY, "r+": os.O_RDWR}
        try:
            self._fd = os.open(file, modes[flags])
        except OSError as error:
            raise RuntimeError(
                f"Unable to open file. Linux system/library function call error at: /x/y.cpp:160: {error.strerror}"
            ) from None
        self._tasks = 0
        log.append(("open", flags, defaults.settings["compat_mode"]))

    def close(self) -> None:
        log.append(("close", self._tasks))
        os.close(self._fd)
        self._fd = -1

    def pread(self, buf: Any, size: int, file_offset: int = 0, task_size: int | None = None) -> IOFuture:
        return self._start("read", buf, size, file_offset, task_size)

    def pwrite(self, buf: Any, size: int, file_offset: int = 0, task_size: int | None = None) -> IOFuture:
        return self._start("write", buf, size, file_offset, task_size)

    def _start(self, kind: str, buf: Any, size: int, offset: int, task_size: int | None) -> IOFuture:
        array = buf.__cuda_array_interface__
        assert array["shape"] == (size,), array
        assert array["typestr"] == "|u1", array
        assert size <= (task_size or defaults.settings["task_size"]), (
            "several tasks: some still run when one has failed"
        )
        pointer, _ = array["data"]
        log.append((kind, offset, size))
        self._tasks += 1
        return IOFuture(lambda: self._task(kind, pointer, size, offset))

    def _task(self, kind: str, pointer: int, size: int, offset: int) -> int:
        try:
            time.sleep(late_s)
            if on_task is not None and (moved := on_task(kind, offset, size)) is not None:
                return moved
            if kind == "write":
                return os.pwrite(self._fd, ctypes.string_at(pointer, size), offset)
            block = os.pread(self._fd, size, offset)
            if len(block) < size:
                raise RuntimeError("KvikIO failure at: /x/posix_io.hpp:222: POSIX error on pread: EOF")
            ctypes.memmove(pointer, block, size)
            return size
        finally:
            self._tasks -= 1
