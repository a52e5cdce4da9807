"""Whole raw pages between files and the memory of a GPU: many at a time, and none under way once a call has ended."""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tierload.errors import InvalidRequest, StoreIOError
from tierload.gds.availability import absence, first_line, loaded, refusal
from tierload.gds.tuning import TASK_BYTES, more_threads, opening

__all__ = ["Extent", "GdsFiles"]

_HANDLES_MAX = 32  # each has descriptors
_ALIGNMENT = 4096  # of pages in segments (docs/FORMAT.md), and what a device reads into a GPU by itself


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes that lie at ``offset`` in a file, a multiple of 4096, and at the address ``pointer`` of a GPU."""

    offset: int
    pointer: int
    nbytes: int

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.nbytes


class GdsFiles:
    """Open files that kvikio moves pages of, for one thread at a time; a context manager.

    ``path`` says which way they go: ``"gds"``, or ``"compat (why)"`` through kvikio's bounce buffers.

    Nothing is ordered with CUDA streams: the caller has waited for what fills the memory that is written, or still uses
    the memory that is read into, and keeps that memory until the call returns. When it does, however it does, nothing
    is under way any more.

    Raises:
        InvalidRequest: There is no kvikio here, or no GPU; ``refusal()`` says so beforehand.
    """

    def __init__(self) -> None:
        kvikio, why = loaded()
        why = why or absence()
        if kvikio is None or why:
            raise InvalidRequest(f"pages cannot go between files and a GPU through kvikio: {why}; take another way")
        self._kvikio = kvikio
        refused = refusal()
        self._direct = not refused
        self.path = f"compat ({refused})" if refused else "gds"
        self._handles: dict[tuple[str, str], Any] = {}
        self._under_way: deque[tuple[Extent, Any]] = deque()
        self._settings = ExitStack()

    def __enter__(self) -> Self:
        self._settings.enter_context(more_threads(self._kvikio))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._settings:
            self._drain()  # nothing is, but after a second interrupt
            while self._handles:
                self._handles.popitem()[1].close()

    def read(self, path: str | os.PathLike[str], extents: Iterable[Extent]) -> None:
        """Fills memory of a GPU with parts of a file; in whatever order.

        Raises:
            InvalidRequest: An extent is empty, or does not begin on 4 KiB of the file; nothing was read.
            StoreIOError: The file cannot be opened, ends early, or fails. Some of the memory may be filled.
        """
        self._move("read", "r", path, extents)

    def write(self, path: str | os.PathLike[str], extents: Iterable[Extent]) -> None:
        """Writes memory of a GPU into parts of a file that exists. It is durable when the file has been synced.

        Raises:
            InvalidRequest: An extent is empty, or does not begin on 4 KiB of the file; nothing was written.
            StoreIOError: The file cannot be opened, or fails, or the disk is full. Some of it may be written.
        """
        self._move("write", "r+", path, extents)

    def _move(self, verb: str, flags: str, path: str | os.PathLike[str], extents: Iterable[Extent]) -> None:
        name = os.fspath(path)
        pieces = list(_pieces(_runs(_checked(name, extents))))
        if not pieces:
            return
        piece = pieces[0]
        try:
            handle = self._opened(name, flags)
            start = handle.pread if verb == "read" else handle.pwrite
            for piece in pieces:
                # A call is one task: of one that kvikio has cut in several, some still run when it raises.
                future = start(_Span(piece), piece.nbytes, piece.offset, piece.nbytes)
                self._under_way.append((piece, future))
            while self._under_way:
                piece, future = self._under_way[0]
                if (moved := future.get()) != piece.nbytes:
                    raise EOFError(f"{moved} bytes of {piece.nbytes}")
                self._under_way.popleft()
        except Exception as error:  # what C++ has thrown: RuntimeError, ValueError, MemoryError
            raise self._failure(verb, name, piece, error) from error
        finally:
            self._drain()
            while len(self._handles) > _HANDLES_MAX:
                self._handles.pop(next(iter(self._handles))).close()

    def _opened(self, name: str, flags: str) -> Any:
        """The handle of a file. Opened for writing it is never made or cut: segments are somebody else's."""
        if (name, flags) not in self._handles:
            with opening(self._kvikio, direct=self._direct):
                self._handles[name, flags] = self._kvikio.CuFile(name, flags)
        return self._handles[name, flags]

    def _drain(self) -> None:
        """Waits for all that is under way. There is an error already, so what these say is dropped; also that one was
        asked before."""
        for _, future in self._under_way:
            with suppress(Exception):
                future.get()
        self._under_way.clear()

    def _failure(self, verb: str, name: str, where: Extent, error: Exception) -> StoreIOError:
        # Without the places in its sources, each as "KvikIO failure at: file.cpp:160: ".
        said = re.sub(r"\b[A-Z][\w/ ]* at: \S+:\d+: ", "", str(error)) or first_line(error)
        code = _errno_of(said)
        if verb == "read":
            advice = "check the store with `tierload verify --full`"
        else:
            advice = "make room there" if code == errno.ENOSPC else "look at the disk and what the kernel says of it"
        message = f"kvikio ({self.path}) did not {verb} bytes {where.offset} to {where.end}: {said}; {advice}"
        return StoreIOError(code, message, name)


class _Span:
    """A piece of a GPU's memory as kvikio takes it: the CUDA array interface, version 3."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, piece: Extent) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (piece.pointer, False),
            "shape": (piece.nbytes,),
            "strides": None,
            "typestr": "|u1",
        }


def _checked(name: str, extents: Iterable[Extent]) -> list[Extent]:
    found = list(extents)
    for extent in found:
        if extent.offset < 0 or extent.offset % _ALIGNMENT or extent.nbytes <= 0 or extent.pointer <= 0:
            raise InvalidRequest(
                f"{extent} of {name} is no page: it begins at a multiple of {_ALIGNMENT} in the file, and has bytes "
                "and an address; pages that lie elsewhere go through the host"
            )
    return found


def _runs(extents: Iterable[Extent]) -> Iterator[Extent]:
    """Extents in the order of the file, neighbours in both file and memory as one."""
    run: Extent | None = None
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if run is not None and run.end == extent.offset and run.pointer + run.nbytes == extent.pointer:
            run = Extent(run.offset, run.pointer, run.nbytes + extent.nbytes)
            continue
        if run is not None:
            yield run
        run = extent
    if run is not None:
        yield run


def _pieces(runs: Iterable[Extent]) -> Iterator[Extent]:
    for run in runs:
        for start in range(0, run.nbytes, TASK_BYTES):
            yield Extent(run.offset + start, run.pointer + start, min(TASK_BYTES, run.nbytes - start))


def _errno_of(said: str) -> int:
    """The number of a system's error that kvikio, which keeps only texts, quotes."""
    codes = (code for code in errno.errorcode if os.strerror(code) in said)
    return max(codes, key=lambda code: len(os.strerror(code)), default=errno.EIO)
