"""An open store, as far as nothing is changed: what there is, comparing, verifying."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Literal, Self

from tierload import _native
from tierload.catalog import CatalogView, decode_text
from tierload.engine import balancing, checking, comparing, devices, heating, records, values
from tierload.engine.inventory import Inventory, find_info
from tierload.engine.job import place
from tierload.engine.loading import table_of
from tierload.errors import CommitDropped, CorruptStore, InvalidRequest, KeyMismatch, StoreIOError, StoreNotFound
from tierload.settings import Settings
from tierload.state import own_keys
from tierload.types import Balance, Change, ChunkInfo, Commit, Difference, HeatTable, ShardInfo, VerifyReport

__all__ = ["OpenStore", "Which"]

Which = int | str | Commit
"""A step, a tag or commit id (or the beginning of one), or a commit."""

_stores: weakref.WeakSet[OpenStore] = weakref.WeakSet()
_THREADS_MAX = 16  # beyond it, memory traffic is the limit and buffers only grow


class OpenStore:
    """What ``Store`` can do in both modes, and how it is opened and closed; see there."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Literal["r", "w"] = "r",
        settings: Settings | None = None,
        take_over: bool = False,
        _faults: _native.Faults | None = None,
    ) -> None:
        if mode not in ("r", "w"):
            raise InvalidRequest(f'mode is {mode!r}; use "r" to read or "w" to write')
        self.path = os.fspath(path)
        self.settings = settings or Settings()
        self._lock = threading.RLock()  # of the catalog and its view
        self._turn = threading.RLock()  # of whoever commits, for as long as that takes; taken before the other one
        self._cached: tuple[int, CatalogView] | None = None
        self._mode = mode
        self._owner = os.getpid()
        self._faults = _faults
        self._native = self._open(take_over)
        self.warnings = tuple(self._native.warnings)
        self.damage = self._native.damage
        _stores.add(self)

    def _open(self, take_over: bool) -> _native.Store:
        return self._open_native(take_over)

    def _open_native(self, take_over: bool, *, writable: bool = False) -> _native.Store:
        known = devices.remembered(self.path) or devices.UNKNOWN
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "command": os.path.basename(sys.argv[0]) if sys.argv else "",
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        try:
            return _native.Store(
                path=self.path,
                writable=writable,
                holder=json.dumps(holder),
                take_over=take_over,
                faults=self._faults,
                journal_roll_bytes=0,
                block_bytes=known.block_bytes,
                depth=known.depth if self.settings.io == "auto" else 0,
            )
        except StoreIOError as error:
            if not writable and isinstance(error.errno, int) and error.errno in (2, 20):
                raise StoreNotFound(
                    f"{self.path} holds no tierload store; tierload.save(state, path) makes one"
                ) from None
            raise

    @property
    def _threads(self) -> int:
        workers = self.settings.threads or min(len(os.sched_getaffinity(0)), _THREADS_MAX)
        return workers if workers > 1 else 0  # one worker needs no thread of its own

    @property
    def io(self) -> str:
        """How large data is moved: ``"direct"``, past the page cache with io_uring, or ``"buffered: <why>"``."""
        why = self._native.stepped_down
        return f"buffered: {why}" if why else "direct"

    # What there is

    def _view(self) -> CatalogView:
        lsn = self._native.last_lsn
        if self._cached is None or self._cached[0] != lsn:
            self._cached = (lsn, CatalogView(self._native, values.decode_value))
        return self._cached[1]

    def commits(self) -> list[Commit]:
        """All commits, newest first; those that a rollback left behind are ``superseded``."""
        with self._lock:
            return self._view().commits

    def head(self) -> Commit | None:
        """The newest commit: what ``load`` gives by default."""
        with self._lock:
            return self._view().head

    def find(self, *, step: int | None = None, commit: str | Commit | None = None, tag: str | None = None) -> Commit:
        """One commit, by step on the head's line, by (the beginning of) its id, or by tag; the head without any.

        Raises:
            CommitNotFound: There is none; the message lists what there is.
        """
        with self._lock:
            return self._view().find(step=step, commit=commit, tag=tag)

    def _find(self, which: Which) -> Commit:
        """A step (int), or a tag or commit id (text)."""
        view = self._view()
        if isinstance(which, Commit):
            return view.find(commit=which)
        if isinstance(which, str):
            return view.find(tag=which) if which in view.tags else view.find(commit=which)
        return view.find(step=which)

    def tags(self) -> dict[str, Commit]:
        """Every tag and its commit."""
        with self._lock:
            view = self._view()
            return {name: view[txid] for name, txid in sorted(view.tags.items())}

    def keys(self, commit: Which | None = None) -> list[ChunkInfo]:
        """What a commit (the head) holds: every stored tensor's key, dtype code, shape and size. Of several ranks'
        commit tensors are whole, and those that each rank has of its own are listed once for each: see ``rank``."""
        with self._lock:
            found = self._view().find() if commit is None else self._find(commit)
            if found.ranks == 1:
                return table_of(self._manifest(found)).chunks.infos()
            return Inventory(found, partial(self._manifest, found)).infos()

    def info(self, key: str, commit: Which | None = None, *, rank: int | None = None) -> ChunkInfo:
        """What a commit (the head) holds under one key, without a look at the others; of what each rank has of its own,
        that of this rank, or of ``rank``.

        Raises:
            KeyMismatch: Nothing is stored under it.
        """
        with self._lock:
            found = self._view().find() if commit is None else self._find(commit)
            if found.ranks > 1:
                owner = (place()[0] if rank is None else rank) % found.ranks
                info = find_info(key, owner, partial(self._manifest, found))
                if info is not None:
                    return info
            else:
                manifest = self._manifest(found)
                number = manifest.find(key.encode("utf-8", "surrogatepass"))
                if number is not None:
                    return table_of(manifest).info(number)
        raise KeyMismatch(
            f"commit {found.id[:12]} (step {found.step}) has no tensor {key!r}; keys() lists those it has",
            missing=[key],
        )

    def stored_bytes(self, commit: Which | None = None) -> int:
        """How many bytes a commit (the head) has on disk, with what it shares with others."""
        with self._lock:
            found = self._view().find() if commit is None else self._find(commit)
            return balancing.stored_bytes(found, partial(self._manifest, found))

    def own_keys(self, commit: Which | None = None) -> tuple[str, ...]:
        """The keys of values, tensors or not, of which each rank of a commit (the head) has its own."""
        with self._lock:
            found = self._view().find() if commit is None else self._find(commit)
            return () if found.ranks == 1 else own_keys(self._manifest(found).state.tobytes())

    def heat(self, commit: Which | None = None) -> HeatTable | None:
        """How hot the tensors of a commit (the head) were when it was saved; None where it was saved without a meter.

        Raises:
            CorruptStore: Its metadata is damaged.
        """
        with self._lock:
            found = self._view().find() if commit is None else self._find(commit)
            manifest = self._manifest(found)
        return heating.heat_in(found, manifest)

    def shards(self, commit: Which | None = None) -> list[ShardInfo]:
        """What each rank has written of a commit (the head), in the order of ranks."""
        with self._lock:
            found = self._view().find() if commit is None else self._find(commit)
            return balancing.shards(self._native, found, partial(self._manifest, found))

    def balance(self, commit: Which | None = None) -> Balance | None:
        """How the writing of a commit (the head) was dealt out to the ranks; None where one rank wrote it, or the plan
        cannot be told from the store."""
        with self._lock:
            found = self._view().find() if commit is None else self._find(commit)
            return balancing.balance(found, self._manifest(found))

    def _manifest(self, commit: Commit, rank: int = 0) -> _native.Manifest:
        try:
            return self._native.manifest(commit.txid, rank)
        except CorruptStore:
            if self._exists(commit):
                raise
        raise CommitDropped(f"commit {commit.id[:12]} was dropped by a collection meanwhile; open the store anew")

    def _exists(self, commit: Commit) -> bool:
        """Whether a commit is still there now. Only a reader can hold an old list: it looks again."""
        if self._native.writable:
            return True
        with OpenStore(self.path) as now:
            return any(other.id == commit.id for other in now.commits())

    # What was, and what is wrong

    def recorded(self, *, lsn: int | None = None) -> dict[str, object]:
        """The value of every recorded key, now or as it was at an LSN.

        Raises:
            InvalidRequest: The history that is kept does not reach back to ``lsn``.
        """
        with self._lock:
            found = self._native.values() if lsn is None else self._native.state_at(lsn).values
        return {decode_text(k): values.decode_recorded(v)[0] for k, v in found.items()}

    def history(self) -> Iterator[Change]:
        """Every record of the journal that is kept, newest first."""
        with self._lock:  # and not while the caller looks at them
            found = list(records.history(self._native, {c.id: c.step for c in self._view().commits}))
        yield from found

    def diff(self, a: Which, b: Which) -> Difference:
        """What changed from commit ``a`` to ``b``, by digests; only pages of small tensors are read."""
        with self._lock:
            return comparing.compare(self._native, self._find(a), self._find(b), self._threads)

    def verify(
        self,
        *,
        full: bool = False,
        commit: Which | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> VerifyReport:
        """Checks the journal, every manifest (both copies) and segment, and every byte of the head's pages; of another
        ``commit``'s instead, or with ``full`` of all commits'. Finds everything that is wrong; repairs nothing.
        ``progress`` is called with numbers of bytes as they are read."""
        with self._lock:
            which = None if commit is None else self._find(commit)
            return checking.verify(
                self._native,
                self._view(),
                full=full,
                commit=which,
                threads=self._threads,
                progress=progress,
                exists=self._exists,
            )

    # Ending

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    _closed = False

    def close(self) -> None:
        """Lets go of the store; closing twice is fine. Records that were not synced are made durable."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.path!r}, {'closed' if self._closed else 'open'})"


def _renew_locks() -> None:
    # A forked child has copies of the stores; their locks may be held by threads that exist in the parent only.
    for store in list(_stores):
        store._lock, store._turn = threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)
