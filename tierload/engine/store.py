"""An open store: the object behind every function of the interface."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence

from tierload import _native
from tierload.catalog import choose_dropped
from tierload.engine import comparing, devices, rolling, saving, values
from tierload.engine.opened import OpenStore, Which
from tierload.errors import CommitNotFound, CorruptStore, InvalidRequest
from tierload.layout import PagePlan
from tierload.state import flatten
from tierload.types import CollectReport, Commit, RollbackPlan, SaveReport

__all__ = ["Store"]

_MEASURE_FROM = 256 << 20  # a save of so many bytes is worth a second of measuring the device, once


class Store(OpenStore):
    """A store, open for reading (``mode="r"``) or for writing (``"w"``, which creates it and holds it until ``close``).

    A reader sees the commits that were durable when it was opened, and never blocks a writer. All methods may be called
    from any thread; they run one at a time. ``warnings`` are faults that cost nothing, such as a damaged mirror.

    Raises:
        StoreNotFound: ``mode="r"`` and there is no store at ``path``.
        StoreBusy: ``mode="w"`` and another process holds it; the message names it. ``take_over=True`` fences that one
            off: for a holder that is frozen, on this machine or another.
        CorruptStore: Metadata is damaged beyond its mirrors; a reader still opens at the newest whole state.
        UnsupportedFormat: A newer release wrote it.
    """

    _outline: object = None  # of the last state that was saved
    _plan: PagePlan | None = None  # of its save
    _known: devices.Device | None = None  # asked once, and again before large saves while nothing is known
    _asked = False
    _cap = 0.0  # megabytes a second that the bucket was made for
    _bucket: _native.TokenBucket | None = None  # kept from save to save: what one took, the next one waits for

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

    def _capped(self) -> _native.TokenBucket | None:
        """The bucket of the setting."""
        if self._cap != self.settings.bandwidth_cap_mbps:
            self._cap = self.settings.bandwidth_cap_mbps
            self._bucket = _native.TokenBucket(self._cap * 1e6) if self._cap else None
        return self._bucket

    def save(
        self,
        state: object,
        *,
        step: int | None = None,
        metrics: Mapping[str, object] | None = None,
        tags: Sequence[str] = (),
        note: str = "",
        allow_pickle: bool = False,
    ) -> SaveReport:
        """Saves a state and returns when it would survive a power cut. Pages equal to the head's are not written again.

        Raises:
            UnsupportedValue: Something in the state cannot be stored; it names the path. Nothing was written.
            StoreIOError: The disk is full or failed; earlier commits are whole.
        """
        start = time.perf_counter()
        meta = values.meta_of(dict(metrics or {}), note)
        flat = flatten(state, allow_pickle=allow_pickle, like=self._outline)
        with self._lock:
            self._outline = flat.outline
            view = self._view()
            cached = self._cached
            every = self.settings.full_every
            fresh = every > 0 and (len(view.line.positions) + 1) % every == 0
            saved = saving.save_state(
                self._native,
                flat,
                self._plan,
                self.settings,
                device=self._device(int(flat.chunks.nbytes.sum())),
                threads=self._threads,
                bucket=self._capped(),
                parent=0 if fresh or view.head is None or self._native.check_commit(view.head.txid) else view.head.txid,
                step=step,
                meta=meta,
                tags=tags,
            )
            self._plan = saved.plan
            # A signal handler may save or tag in the midst of this: then the list of commits is read anew.
            if not tags and self._cached is cached:
                view.append(saved.record)
                self._cached = (saved.record.lsn, view)
            commit = self._view()[saved.record.txid]
        return SaveReport(
            commit=commit,
            seconds=time.perf_counter() - start,
            raw_bytes=commit.raw_bytes,
            written_bytes=commit.written_bytes,
            pages=saved.pages,
            compression=saved.compression,
            written_pages=saved.written_pages,
            path=self.path,
            pacing=saved.pacing,
            notes=flat.notes,
        )

    def rollback(
        self,
        to: Which | None = None,
        *,
        lsn: int | None = None,
        steps: int | None = None,
        dry_run: bool = False,
    ) -> RollbackPlan:
        """Makes an earlier state the head again: ``to`` a step, tag or commit id, to an ``lsn``, or ``steps`` commits
        back. It is itself a commit, so it can be undone; no data is copied or lost. Recorded values go back with it.

        Raises:
            CommitNotFound: There is no such commit.
            CorruptStore: The target's metadata is damaged; nothing was changed.
        """
        if sum(value is not None for value in (to, lsn, steps)) != 1:
            raise InvalidRequest("say where to roll back to: one of to=, lsn= and steps=")
        with self._lock:
            view = self._view()
            if lsn is None:
                target = view.back(steps) if steps is not None else self._find(to)  # type: ignore[arg-type]
                past = self._native.state_at(target.lsn)
            else:
                if not 0 < lsn <= self._native.last_lsn:
                    raise CommitNotFound(f"there is no LSN {lsn}; the newest is {self._native.last_lsn}")
                past = self._native.state_at(lsn)
                if past.head not in view:
                    raise CommitNotFound(f"at LSN {lsn} there was no commit, or it has been collected since")
                target = view[past.head]
            problem = self._native.check_commit(target.txid)
            if problem:
                raise CorruptStore(f"{self.path}: commit {target.id[:12]} (step {target.step}) is damaged: {problem}")
            plan = rolling.plan_rollback(self._native, view, target, past)
            if dry_run:
                with contextlib.suppress(CorruptStore):  # the head may be what one goes back from because it is damaged
                    difference = comparing.compare(self._native, plan.head, target, self._threads)
                    plan = dataclasses.replace(plan, difference=difference)
                return plan
            txid = rolling.commit_rollback(self._native, plan, past)
            return dataclasses.replace(plan, commit=self._view()[txid])

    def tag(self, name: str, commit: Which | None = None, *, remove: bool = False) -> None:
        """Names a commit (the head), moves the name, or removes it. A tagged commit is never collected."""
        with self._lock:
            if remove:
                self._view().find(tag=name)  # an error when there is none
                txid = 0
            else:
                txid = (self._view().find() if commit is None else self._find(commit)).txid
            self._native.tag(name.encode("utf-8", "surrogatepass"), txid)

    def record(self, key: str, value: object, step: int | None = None, *, sync: bool = True) -> int:
        """Logs a small value between commits and returns its LSN; durable when it returns. With ``sync=False`` it
        becomes durable with the next commit or synced record. A rollback brings back the value of its time."""
        document = values.encode_recorded(key, value, step)
        with self._lock:
            cached = self._cached
            known = cached is not None and cached[0] == self._native.last_lsn
            lsn = self._native.change(key.encode("utf-8", "surrogatepass"), document, sync)
            if known and cached is not None and self._cached is cached:  # commits and tags are what they were
                self._cached = (lsn, cached[1])
            return lsn

    def collect(
        self, *, keep: int | None = None, keep_every: int | None = None, dry_run: bool = False
    ) -> CollectReport:
        """Drops old commits and frees what nothing references. ``keep``: the newest so many of the head's line;
        ``keep_every``: also those whose step is a multiple. The head, tagged commits, and what a reader is using stay.
        Without ``keep`` nothing is dropped; only remains of interrupted saves are removed.

        Raises:
            InvalidRequest: ``keep`` is less than 1.
            CorruptStore: A kept commit's metadata is damaged: nothing is freed while that is so.
        """
        with self._lock:
            view = self._view()
            dropped: tuple[Commit, ...] = ()
            if keep is not None:
                dropped = choose_dropped(view.commits, view.line, view.sources, keep=keep, keep_every=keep_every)
            elif keep_every is not None:
                raise InvalidRequest("keep_every needs keep: how many of the newest commits to keep besides")
            if dry_run:
                return CollectReport(dropped=dropped)
            result = self._native.collect([c.txid for c in dropped])
        return CollectReport(dropped, result.removed_files, result.freed_bytes, result.pinned)
