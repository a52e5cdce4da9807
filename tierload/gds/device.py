"""GPUs, and a little memory of one, by the CUDA driver itself: torch is not known here, and takes seconds to import."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Self

__all__ = ["DeviceMemory", "device_count"]


def device_count() -> int:
    """How many GPUs this process may use; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


class DeviceMemory:
    """``nbytes`` bytes of a GPU at the address ``pointer``, until the block ends.

    Raises:
        RuntimeError: The driver refuses, for instance since that much is not free; its own words.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        handle, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        # The context that torch has too. It ends with the process, as does its thread's.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        self.pointer = pointer.value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(self.pointer))

    def fill(self, block: bytes, at: int) -> None:
        """Copies bytes there, ``at`` so many from its beginning; they are there when it returns."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.pointer + at), block, ctypes.c_size_t(len(block)))
        self._call("cuCtxSynchronize")  # from memory that is not pinned, the call may return a little earlier

    def bytes_at(self, at: int, nbytes: int) -> bytes:
        """Copies bytes from there."""
        block = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH_v2", block, ctypes.c_uint64(self.pointer + at), ctypes.c_size_t(nbytes))
        return block.raw

    def _call(self, name: str, *arguments: object) -> None:
        code = self._cuda[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({code})")
