"""An open store, as far as nothing is changed: what there is, loading, comparing, verifying."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tierload import _native
from tierload.catalog import CatalogView, decode_text
from tierload.engine import balancing, checking, comparing, devices, records, values
from tierload.engine.company import company_of
from tierload.engine.hot_start import HotOptions, HotStart, Stage
from tierload.engine.inventory import Inventory, find_info
from tierload.engine.job import place
from tierload.engine.loading import Source, Whole, fill, table_of
from tierload.engine.pinned import PinnedPages, pinned
from tierload.engine.reading import CommitReader
from tierload.engine.shards import Shards
from tierload.errors import CommitDropped, CorruptStore, InvalidRequest, KeyMismatch, StoreIOError, StoreNotFound
from tierload.settings import Settings
from tierload.state import Outline, own_keys, plan_bind, plan_hot, plan_lazy, plan_load, read_heat
from tierload.types import Balance, Change, ChunkInfo, Commit, Difference, HeatTable, ShardInfo, VerifyReport

if TYPE_CHECKING:
    import torch

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

    def _newest_whole(self) -> Commit:
        """The head, or when its metadata is damaged, the newest commit of its line that is whole, with a warning."""
        view = self._view()
        head = view.find()
        if self._native.head_damage:
            problems = {txid: self._native.check_commit(txid) for txid in view.line.positions}
            whole = next((view[txid] for txid, problem in problems.items() if not problem), head)
            if whole != head:
                skipped = "; ".join(
                    f"{view[txid].id[:12]} (step {view[txid].step}): {problem}"
                    for txid, problem in problems.items()
                    if problem and txid > whole.txid
                )
                warnings.warn(
                    f"{self.path}: loading commit {whole.id[:12]} (step {whole.step}), since newer ones are damaged: "
                    f"{skipped}. `tierload rollback` makes it the head",
                    stacklevel=4,
                )
                return whole
        return head

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
        return _heat_in(found, manifest)

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

    # Loading

    def load(
        self,
        *,
        step: int | None = None,
        commit: str | Commit | None = None,
        tag: str | None = None,
        into: object = None,
        strict: bool = True,
        cast: bool = False,
        keys: str | Sequence[str] | None = None,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        rank: int | None = None,
        together: bool | None = None,
        lazy: bool = False,
    ) -> object:
        """Loads a commit (the head) and verifies every byte of it: returns the state, or fills ``into`` in place and
        returns a ``LoadReport``.

        Of a state that ranks saved together every rank reads what its own target needs, whatever the number of ranks
        was; without a target, tensors that were spread over ranks are whole. Values that each rank had of its own are
        those of this rank, or of ``rank``; where fewer ranks saved than load, they are dealt out again from rank 0 on.

        ``keys`` are patterns (``*``, ``?``); only pages that hold matching keys are read. ``cast`` allows conversion
        between floating dtypes. ``types`` are the dataclasses, named tuples, enums and tensor subclasses that may
        be rebuilt. In a target, a sparse tensor gets new indices and values and a nested one is exchanged, both staying
        the same objects; the memory of all others is overwritten (docs/decisions/0009).

        Where torch.distributed is initialised and ``into`` has tensors that are spread over all ranks, or over one set
        of them, these load ``together``: each has to call this, ranks of one node read each page once between them, and
        an error of one is raised on all of these. True: also without such a target, by all ranks of the job; False:
        this rank reads by itself.

        ``lazy``: the state has a ``LazyTensor`` for each tensor, which is read, and verified, when it is used:
        ``state["emb"][a:b]`` and ``state["emb"][rows]`` read the pages that they need and no others, and give a tensor
        of their own; of a stored view of something, all of it is read. Shapes and dtypes are known without. Any other
        use reads the whole, once: ``materialise()`` is the tensor that a load gives. Other values are read at once, and
        so are tensors that are made of others (sparse, quantized, nested, subclasses). The commit stays readable until
        all is read or gone, whatever becomes of the store, also for processes that are forked or sent lazy tensors
        (workers of data loaders); a pickle, a copy and a save hold the values.

        Raises:
            KeyMismatch: ``into`` differs from what is stored: everything is listed, and nothing was changed.
            CorruptPage: A page is damaged; the error says where, and which keys of ``into`` had been overwritten.
                Of a lazy tensor, it is raised by the use that needs the page.
            InvalidRequest: ``lazy`` with ``into`` or ``together``.
        """
        if lazy and (into is not None or together):
            raise InvalidRequest("lazy=True reads tensors one by one when they are used: leave out into= and together=")
        self._wait_for_background()
        patterns = [keys] if isinstance(keys, str) else keys
        here, ranks = place()
        if lazy:
            whose = here if rank is None else rank
            source = pinned(self._source(step, commit, tag, whose, ranks))
            find = partial(_find_pinned, os.path.abspath(self.path), source.commit.id, whose, ranks)
            pages = PinnedPages(source, find, self._threads, here)
            lazily = plan_lazy(source.document, pages, keys=patterns, types=types, allow_pickle=allow_pickle)
            pages.read(lazily)
            return lazily.finish()
        holders: set[tuple[int, ...]] = set()  # of tensors in the target
        try:
            source = self._source(step, commit, tag, here if rank is None else rank, ranks)
            if into is None:
                plan = plan_load(source.document, source.chunks, keys=patterns, types=types, allow_pickle=allow_pickle)
            else:
                plan = plan_bind(
                    source.document,
                    source.chunks,
                    into,
                    strict=strict,
                    cast=cast,
                    keys=patterns,
                    types=types,
                    allow_pickle=allow_pickle,
                    holders=holders,
                    whole=source.whole,
                )
        except BaseException as error:
            company = company_of(self.settings, together, holders)
            if company is not None:
                company.refuse(error)
            raise
        company = company_of(self.settings, together, holders)
        if company is None:
            fill(source, plan, self._threads, here)
        else:
            company.fill(source, plan, self._threads)
        return plan.finish()

    def hot_start(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        commit: str | Commit | None = None,
        tag: str | None = None,
        into: object = None,
        key: str | None = None,
        example: tuple[Any, ...] | Mapping[str, Any] | None = None,
        strict: bool = True,
        cast: bool = False,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        rank: int | None = None,
        progress: bool = False,
        began: float | None = None,
    ) -> HotStart:
        """Loads a commit (the head) into ``model`` and ``optimizer`` while they are used already: it returns at once,
        and the first use of a tensor waits for that one. See ``HotStart``.

        The model is looked for in the stored state by the names of its tensors, or is at ``key``; ``into`` is a whole
        target, as ``load`` takes it, of which ``model`` and ``optimizer`` are parts. Tensors arrive in the order in
        which a forward pass uses them: as an ``example`` of its arguments shows (nothing is computed), as the commit's
        heat recorded it, else as modules are registered. States of optimizers come last.

        Tensors on meta get their memory. A buffer on meta that is in no state dict has to be computed before, which is
        an error. Tensors that cannot be made to wait are there when it returns: those that are spread over ranks,
        subclasses, modules in TorchScript or with a loading of their own.

        Raises:
            KeyMismatch: Store and target differ: everything is listed, and nothing was changed.
            CorruptPage: Of what has to be there at once. Later, it is raised by the use that needs the page.
        """
        began = time.perf_counter() if began is None else began
        self._wait_for_background()
        here, ranks = place()
        whose = here if rank is None else rank
        source = pinned(self._source(step, commit, tag, whose, ranks))
        find = partial(_find_pinned, os.path.abspath(self.path), source.commit.id, whose, ranks)
        pages = PinnedPages(source, find, self._threads, here)
        rows = sum(len(source.table(holder).pages) for holder in range(source.commit.ranks))
        opened = Stage("open", time.perf_counter() - began, f"{rows} pages of {source.commit.ranks} shards, verified")
        start = time.perf_counter()
        plan = plan_hot(
            source.document,
            source.chunks,
            (model, optimizer) if into is None else into,
            key=key,
            strict=strict,
            cast=cast,
            types=types,
            allow_pickle=allow_pickle,
            whole=source.whole,
        )
        options = HotOptions(
            example, _heat_in(source.commit, source.manifest(0)), self.settings.hot_budget_bytes, progress
        )
        return HotStart(source, plan, pages, opened, options, self._threads, here, start)

    def reader(
        self,
        *,
        step: int | None = None,
        commit: str | Commit | None = None,
        tag: str | None = None,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        rank: int | None = None,
    ) -> CommitReader:
        """What a commit (the head) holds, without its bytes, and with what is needed to read parts of it. The options
        are those of ``load``.

        Raises:
            CorruptStore: Its metadata is damaged.
        """
        self._wait_for_background()
        here, ranks = place()
        source = self._source(step, commit, tag, here if rank is None else rank, ranks)
        outline = Outline(source.document, source.chunks, types=types, allow_pickle=allow_pickle)
        return CommitReader(source, outline, threads=self._threads, rank=here)

    def _source(self, step: int | None, commit: str | Commit | None, tag: str | None, rank: int, ranks: int) -> Source:
        """A commit's shards, and its state as ``rank`` of ``ranks`` sees it."""
        with self._lock:
            if step is None and commit is None and tag is None:
                found = self._newest_whole()
            else:
                found = self._view().find(step=step, commit=commit, tag=tag)
            manifest = self._manifest(found)
        if found.ranks == 1:
            return Whole(found, manifest)
        return Shards(found, partial(self._manifest, found), rank=rank, ranks=ranks)

    def _wait_for_background(self) -> None:
        """What a writer has begun is part of what there is to load; a reader sees what was durable when it opened."""

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


def _heat_in(commit: Commit, manifest: _native.Manifest) -> HeatTable | None:
    """The heat in a commit, by the first of its shards."""
    document = manifest.state.tobytes()
    if b'"heat"' not in document:
        return None  # as most are; otherwise the word may stand in a text
    if commit.ranks > 1:
        return read_heat(document)
    chunks = table_of(manifest).chunks
    return read_heat(document, chunks.keys_at(range(len(chunks))))


def _find_pinned(path: str, commit: str, rank: int, ranks: int) -> Source:
    """A commit for a process that knows no more than where it is."""
    with OpenStore(path) as store:
        return pinned(store._source(None, commit, None, rank, ranks))


def _renew_locks() -> None:
    # A forked child has copies of the stores; their locks may be held by threads that exist in the parent only.
    for store in list(_stores):
        store._lock, store._turn = threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)
