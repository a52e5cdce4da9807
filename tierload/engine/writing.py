"""How a store that is open for writing writes: in which turn, with what, and what becomes of it after a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tierload import _native
from tierload.catalog import CatalogView
from tierload.engine import devices, values
from tierload.engine.accelerators import streams
from tierload.engine.background import Background, copy_threads
from tierload.engine.heating import table_of_meter
from tierload.engine.job import Job
from tierload.engine.loads import LoadingStore
from tierload.engine.saving import Draft, Effort, Saved, page_set, save_state
from tierload.engine.together import Around, refuse_together, save_together
from tierload.errors import CorruptStore, InvalidRequest, UnsupportedValue
from tierload.layout import PagePlan, place_pages, plan_pages, segment_sizes
from tierload.settings import Settings
from tierload.state import flatten
from tierload.types import Commit, FlatState, SaveReport

if TYPE_CHECKING:
    from tierload.heat import HeatMeter

__all__ = ["WritingStore"]

_ROW_BYTES = 64
_PARENTS_MAX = 64  # shards that are looked through for pages when the number of ranks has changed
_MEASURE_FROM = 256 << 20  # a save of so many bytes is worth a second of measuring the device, once


class WritingStore(LoadingStore):
    """What ``Store`` does for those of its methods that change something; see there."""

    _outline: object = None  # of the last state that was saved
    _plan: tuple[PagePlan, _native.PageSet] | None = None  # of its save
    _known: devices.Device | None = None  # asked once, and again before large saves while nothing is known
    _asked = False
    _bucket: tuple[float, _native.TokenBucket] | None = None  # by what bandwidth_cap_mbps was
    _background: Background | None = None  # made at the first save in the background
    _needs_reopening = False
    _job: Job | None = None  # of ranks that save together
    _shard: tuple[int, bytes] | None = None  # the commit that this rank has last had a part in, and the row of that

    def _open(self, take_over: bool) -> _native.Store:
        if self._mode == "r":
            return super()._open(take_over)
        if self._job is None:
            self._job = Job.of(self.settings)
        job = self._job
        if job is None:
            return self._open_native(take_over, writable=True)
        return job.open(self.path, lambda writable: self._open_native(take_over, writable=writable))

    def _device(self, nbytes: int) -> devices.Device:
        """What the store lies on; it is measured before the first large save."""
        large = nbytes >= _MEASURE_FROM
        if self._known is None and (large or not self._asked):
            self._known, self._asked = devices.remembered(self.path), True
            if self._known is None and large and self.settings.compression == "auto":
                # A disk too full to be measured may still take what changed; if not, the save says so itself.
                with contextlib.suppress(OSError):
                    self._known = devices.calibrate(self.path)
        return self._known or devices.UNKNOWN

    def write(self, draft: Draft, effort: Effort, settings: Settings) -> SaveReport:
        """Writes and commits what a save has described, in its turn."""
        saved = self.write_draft(draft, effort, settings)
        return SaveReport(
            commit=saved.commit,
            seconds=time.perf_counter() - effort.began,
            raw_bytes=saved.commit.raw_bytes,
            written_bytes=saved.commit.written_bytes,
            pages=saved.pages,
            compression=saved.compression,
            written_pages=saved.written_pages,
            path=self.path,
            pacing=saved.pacing,
            notes=draft.flat.notes,
        )

    def write_draft(self, draft: Draft, effort: Effort, settings: Settings) -> Saved:
        """The same, in the terms of the engine."""
        with self._turn:
            if self._job is not None:
                return self._write_together(self._job, draft, effort, settings)
            return save_state(
                self._native,
                self._lock,
                draft,
                settings,
                effort,
                path=self.path,
                way=self._way() if draft.devices else None,
                parent=self._parent(settings),
                threads=self._threads,
                device=self._device(draft.nbytes),
                bucket=self._capped(settings),
                committed=self._committed,
            )

    def _write_together(self, job: Job, draft: Draft, effort: Effort, settings: Settings) -> Saved:
        if self._needs_reopening:
            self._reopen_if_needed(together=True)
        if effort.staging is None and draft.devices:
            effort = dataclasses.replace(effort, staging=_on_host(draft))
        around = Around(
            native=lambda: self._native,
            lock=self._lock,
            job=job,
            parent=lambda: self._parent(settings),
            parents=self._parents,
            threads=self._threads,
            device=lambda: self._device(draft.nbytes),
            bucket=self._capped(settings),
            committed=self._committed,
        )
        saved, row = save_together(around, draft, settings, effort)
        self._shard = saved.commit.txid, row
        return saved

    def _parent(self, settings: Settings) -> int:
        """The commit whose pages may be referenced; 0: none."""
        with self._lock:
            view = self._view()
            fresh = settings.full_every > 0 and (len(view.line.positions) + 1) % settings.full_every == 0
            if fresh or view.head is None:
                return 0
            if view.head.ranks == 1:
                damaged = bool(self._native.check_commit(view.head.txid))
            else:  # each rank looks after its own shard, below
                damaged = self._root(view.head.txid) is None
            return 0 if damaged else view.head.txid

    def _root(self, txid: int) -> bytes | None:
        """The rows of a commit's root; None when it is damaged."""
        try:
            return self._native.root(txid)
        except CorruptStore:
            return None

    def _parents(self, txid: int) -> tuple[list[_native.Manifest], bytes]:
        """The shards of a commit that may have pages which this rank writes again: its own, with its row in the root;
        of a commit by another number of ranks, all of them, unless they are many. None that is damaged."""
        assert self._job is not None
        if txid == 0:
            return [], b""
        with self._lock:
            if self._shard is None or self._shard[0] != txid:
                self._view()
                rows = self._native.root(txid)
                ranks = len(rows) // _ROW_BYTES
                if ranks != self._job.ranks and ranks > _PARENTS_MAX:
                    return [], b""
                if ranks != self._job.ranks:
                    shards = [self._whole_shard(_row(rows, rank), ranks) for rank in range(ranks)]
                    return [shard for shard in shards if shard is not None], b""
                self._shard = txid, _row(rows, self._job.rank)
            shard = self._whole_shard(self._shard[1], self._job.ranks)
            return ([], b"") if shard is None else ([shard], self._shard[1])

    def _whole_shard(self, row: bytes, ranks: int) -> _native.Manifest | None:
        """The shard in a row of a root, unless it is damaged, or a segment that it names is."""
        try:
            shard = self._native.shard(row, ranks)
        except CorruptStore:
            return None
        sizes = enumerate(segment_sizes(shard.segments))
        there = all(self._native.segment_size(shard.segment_path(number)) == size for number, size in sizes)
        return shard if there else None

    def _capped(self, settings: Settings) -> _native.TokenBucket | None:
        """What the store may write; it is kept as long as the cap is the same."""
        cap = settings.bandwidth_cap_mbps
        if cap == 0:
            return None
        if self._bucket is None or self._bucket[0] != cap:
            self._bucket = cap, _native.TokenBucket(cap * 1e6)
        return self._bucket[1]

    def _draft(
        self,
        state: object,
        step: int | None,
        metrics: Mapping[str, object] | None,
        tags: Sequence[str],
        note: str,
        allow_pickle: bool,
        heat: HeatMeter | None,
    ) -> Draft:
        table = table_of_meter(heat, state, self.settings.page_bytes)
        meta = values.meta_of(dict(metrics or {}), note)
        flat = flatten(state, allow_pickle=allow_pickle, like=self._outline)
        self._outline = flat.outline
        sizes = self.settings.page_bytes, self.settings.pack_below_bytes
        last, pages = self._plan or (None, None)
        plan = (last and last.again(flat, *sizes)) or plan_pages(flat, *sizes)
        if pages is None or plan is not last:
            pages = page_set(plan)
        self._plan = plan, pages
        if not self.together:
            _refuse_parts(flat)
        placement = None
        # Ranks that save together place what each of them writes, later; a copy has each chunk in one piece for that.
        if table is not None and not self.together:
            placement = place_pages(plan, table, self.settings.hot_budget_bytes)
        if placement is not None:
            pages = page_set(plan, placement)
        return Draft(flat, plan, pages, step, meta, values.tags_of(tags), table, placement)

    def _committed(self, save: _native.Save, **record: Any) -> Commit:
        """The short part of a save, in which nobody else uses the catalog."""
        with self._lock:
            view = self._view()
            cached = self._cached
            done = save.commit(**record)
            # A signal handler may tag in the midst of this: then the list of commits is read anew.
            if not record["tags"] and self._cached is cached:
                view.append(done)
                self._cached = (done.lsn, view)
            return self._view()[done.txid]

    @property
    def together(self) -> bool:
        """Whether other ranks of a job take part in every save."""
        return self._job is not None

    def refuse(self, error: BaseException) -> None:
        """Tells the other ranks what keeps this one from a save that they are in.

        Raises:
            BaseException: ``error``, or what went wrong before it on another rank.
        """
        assert self._job is not None
        with self._turn:
            refuse_together(self._job, error)

    def reopen(self) -> None:
        """Begins a new epoch, after a failure that poisoned this one's writer."""
        with self._turn, self._lock:
            self._native.close()
            self._needs_reopening = True  # until it has succeeded: now, or at a later call
            self._reopen_if_needed(together=True)

    @property
    def poisoned(self) -> bool:
        """Whether an earlier failure left the disk in doubt: nothing can be written before ``reopen``."""
        with self._lock:
            if self._job is not None:
                return self._job.failed
            return self._needs_reopening or self._native.poisoned

    def _reopen_if_needed(self, *, together: bool = False) -> None:
        """``together``: all ranks are here, and open it with this one."""
        elsewhere = self._job is not None and self._job.rank > 0  # rank 0 may have done anything since we looked
        if self._closed or not (self._needs_reopening or elsewhere):
            return
        if self._needs_reopening and self._job is not None:
            if not together:
                return  # it is done by the next save, which they all take part in
            self._native = self._open(take_over=False)
            self._job.failed = False
        else:
            self._native = self._open_native(take_over=False, writable=self._job is None)
        self._cached = None
        self._needs_reopening = False

    def _refuse_elsewhere(self, what: str) -> None:
        """Only rank 0 of a job holds the store.

        Raises:
            InvalidRequest: This is another rank.
        """
        if self._job is not None and self._job.rank > 0:
            raise InvalidRequest(f"{self.path} is held by rank 0 of this job: {what} there, and on no other rank")

    def _view(self) -> CatalogView:
        self._reopen_if_needed()
        return super()._view()

    def _raise_untold(self) -> None:
        if self._background is not None and os.getpid() == self._owner:
            self._background.raise_untold()

    def _in_background(self) -> Background:
        if self._mode == "r":
            raise InvalidRequest(f"{self.path} is open for reading only")
        if os.getpid() != self._owner:
            raise InvalidRequest(
                f"{self.path} was opened for writing by process {self._owner}, which holds it; a forked process has to "
                "open it itself"
            )
        background = self._background
        if background is not None and not self._closed:
            return background  # without the lock, which a collection holds for as long as it removes files
        with self._lock:
            if self._closed:
                raise InvalidRequest("the store is closed")
            if self._background is None:
                self._background = Background(self)
            return self._background

    def _wait_for_background(self) -> None:
        """Saves that were begun earlier come first, and what went wrong in them is said."""
        if self._background is not None and os.getpid() == self._owner:
            if self._background.busy:
                self.refuse_inside()
                self._background.settle()
            self._background.raise_untold()

    def refuse_inside(self) -> None:
        """In a signal handler that interrupts a use of this store on the same thread, waiting would never end."""
        inside = self._background is not None and self._background.waits_for_caller
        if inside or self._lock._is_owned() or self._turn._is_owned():  # type: ignore[attr-defined]
            raise InvalidRequest(
                f"{self.path}: another call on this store is under way in this very thread, which a signal handler "
                "interrupted; let the handler set a flag, and save at the next step"
            )


def _on_host(draft: Draft) -> _native.Staging:
    """A copy of a state in the host's memory: ranks that save together look at each other's bytes there."""
    arena = _native.Arena(draft.page_set.staging_bytes)
    now = np.zeros(len(draft.plan.packed), np.uint8)
    staging = _native.Staging(draft.page_set, now, arena, None, streams(draft.devices))
    staging.copy_now(copy_threads())
    return staging


def _row(rows: bytes, rank: int) -> bytes:
    """A rank's row of a root."""
    return rows[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES]


def _refuse_parts(flat: FlatState) -> None:
    """A process that saves alone has whole tensors only.

    Raises:
        UnsupportedValue: It has a part of one.
    """
    for chunk, part in flat.sharded.items():
        if flat.chunks.info(chunk).shape != part.shape:
            raise UnsupportedValue(
                f"{flat.chunks.key(chunk)} is a part of a tensor of shape {part.shape} that "
                f"{len(part.layout.mesh.ranks)} ranks hold: all of them have to save together (Settings.ranks)"
            )
