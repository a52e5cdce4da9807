"""A save: flatten → plan pages → digest, compare, encode and write → commit."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tierload import _native
from tierload.engine.accelerators import present, synchronize
from tierload.engine.devices import Device
from tierload.engine.direct import written_pages
from tierload.engine.values import encode_meta
from tierload.errors import StoreIOError
from tierload.gds import Choice
from tierload.layout import PagePlan, Placement
from tierload.settings import Settings
from tierload.state import write_heat
from tierload.types import Commit, FlatState, HeatTable, Pacing

__all__ = ["OUT_OF_SPACE", "Draft", "Effort", "Saved", "io_of", "out_of_space", "page_set", "save_state"]

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class Draft:
    """A state that is about to be saved, and what its commit says of itself. ``meta`` is in the form of ``values``.
    ``heat`` is that of its tensors, where it is known, and ``placement`` the order of ``page_set`` for it."""

    flat: FlatState
    plan: PagePlan
    page_set: _native.PageSet
    step: int | None
    meta: dict[str, object]
    tags: tuple[str, ...]
    heat: HeatTable | None = None
    placement: Placement | None = None

    @property
    def devices(self) -> list[int]:
        """The accelerators that have any of it, by their numbers."""
        return present(self.flat.devices)

    @property
    def nbytes(self) -> int:
        """Raw bytes of the state."""
        return int(self.flat.chunks.nbytes.sum())

    @property
    def document(self) -> bytes:
        """What the manifest says of the state, and of its heat."""
        if self.heat is None:
            return self.flat.document
        chunks = self.plan.chunks
        return write_heat(self.flat.document, self.heat, chunks.keys_at(range(len(chunks))))

    def let_go(self) -> None:
        """Forgets the tensors: a copy of them is what will be written."""
        self.flat = replace(self.flat, owners=None)


@dataclass(frozen=True, slots=True)
class Effort:
    """How a save is carried out. ``staging`` has the bytes, where a copy was made, and ``check`` is called before they
    are committed; ``background`` yields to the training loop. ``began`` is when the user called (perf_counter)."""

    began: float
    staging: _native.Staging | None = None
    background: bool = False
    progress: _native.Progress | None = None
    cancel: _native.Cancel | None = None
    check: Callable[[], None] = lambda: None


class Saved:
    """A finished save: its commit, and what it did."""

    def __init__(self, commit: Commit, save: _native.Save) -> None:
        self.commit = commit
        self.pages = save.pages
        self.compression = save.compression
        self.written_pages = save.written_pages
        self.written_bytes = save.written_bytes
        self.latencies_ms = latencies = [seconds * 1e3 for _, seconds in save.segment_times]
        self.pacing = Pacing(
            segments=len(latencies),
            latency_ms_mean=sum(latencies) / max(len(latencies), 1),
            latency_ms_max=max(latencies, default=0.0),
            late_segments=save.late_segments,
            throttled_seconds=save.throttled_seconds,
        )


def save_state(
    native: _native.Store,
    lock: threading.RLock,
    draft: Draft,
    settings: Settings,
    effort: Effort,
    *,
    path: str,
    way: Choice | None,
    parent: int,
    threads: int,
    device: Device,
    bucket: _native.TokenBucket | None,
    committed: Callable[..., Commit],
) -> Saved:
    """Writes a state into the store at ``path`` and commits it; ``way`` is that of what accelerators have. Pages that
    commit ``parent`` has are referenced (0: all are written). ``lock`` is held while the catalog is used, and not while
    bytes are written. ``threads`` work (0: the caller alone); the rate of ``device`` decides whether compression pays.
    ``committed`` calls ``Save.commit`` and gives the commit.

    Raises:
        StoreIOError: The disk is full (nothing has changed, earlier commits are whole) or failed (the writer is
            poisoned).
        SaveCancelled: Nothing has changed.
    """
    save = None
    try:  # from here on, whatever happens (Ctrl-C too), the attempt is over and its files are gone
        with lock:
            manifest = native.manifest(parent) if parent else None
            save = _native.Save(native)
        moved = native.direct_bytes
        if effort.staging is None:
            synchronize(draft.devices)
        with written_pages(path, way if bucket is None else None) as direct:
            save.write(
                pages=draft.page_set,
                staging=effort.staging,
                parents=[manifest] if manifest is not None else [],
                compression=settings.compression,
                device_rate=device.write,
                read_rate=device.read,
                threads=threads,
                segment_bytes=settings.max_segment_size_mb << 20,
                flush_interval_ms=settings.flush_interval_ms,
                bucket=bucket,
                background=effort.background,
                cancel=effort.cancel,
                progress=effort.progress,
                direct=direct,
            )
        effort.check()
        save.write_manifest(
            page_bytes=settings.page_bytes,
            chunks=draft.plan.rows.view(np.uint8),
            dims=draft.plan.chunks.dims.view(np.uint8),
            keys=draft.plan.chunks.keys,
            state=draft.document,
            heats=None if draft.placement is None else draft.placement.heats,
        )
        save.flush()
        commit = committed(
            save,
            step=draft.step,
            meta=encode_meta(draft.meta | {"io": io_of(native, moved, way, save.direct_pages)}),
            tags=[tag.encode("utf-8", "surrogatepass") for tag in draft.tags],
        )
    except StoreIOError as error:
        if error.errno in OUT_OF_SPACE:
            raise out_of_space(error, native, draft.nbytes) from error
        raise
    finally:
        if save is not None:
            with lock:
                save.abort()
    return Saved(commit, save)


def page_set(plan: PagePlan, placement: Placement | None = None) -> _native.PageSet:
    """The pages of a plan, as the core takes them, in the order in which they are placed."""
    return _native.PageSet.of(
        pointers=plan.pointers,
        lengths=plan.lengths,
        part_views=plan.part_views,
        part_offsets=plan.part_offsets,
        views=plan.views,
        parts_of_page=plan.parts_of_page,
        item_sizes=plan.item_sizes,
        floating=plan.floating,
        packed=plan.packed,
        order=placement.order if placement else None,
        hot=placement.hot if placement else 0,
        devices=plan.devices,
    )


def io_of(native: _native.Store, before: int, way: Choice | None = None, direct_pages: int = 0) -> str:
    """Which way the pages went, for the commit's record; and those of accelerators, with the reason for it."""
    if native.direct_bytes > before:
        io = "direct"
    else:
        io = f"buffered: {native.stepped_down}" if native.stepped_down else "buffered"
    if way is None:
        return io
    return f"{io}; GPU: {way.why}" if way.save == "ring" or direct_pages else f"{io}; GPU: ring, nothing was raw"


def out_of_space(error: StoreIOError, native: _native.Store, needed: int) -> StoreIOError:
    """A full disk, with what is needed and what there is."""
    free = native.free_bytes
    return StoreIOError(
        error.errno,
        f"{error.strerror}: the save was given up and removed; earlier commits are whole. The state has {needed:,} "
        f"bytes, of which what changed has to fit, compressed, and {free:,} are free now. Free some space, or drop old "
        f"commits with `tierload gc --keep N`",
        error.filename,
    )
