"""A save: flatten → plan pages → digest, compare, encode and write → make durable → commit."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence

import numpy as np

from tierload import _native
from tierload.engine.devices import Device
from tierload.engine.values import encode_meta
from tierload.errors import StoreIOError
from tierload.layout import PagePlan, plan_pages
from tierload.settings import Settings
from tierload.types import FlatState, Pacing

__all__ = ["Saved", "save_state"]

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Saved:
    """A finished save: its commit record, and what it did."""

    def __init__(self, record: _native.CommitRecord, plan: PagePlan, save: _native.Save, seconds: float) -> None:
        self.record = record
        self.plan = plan
        self.seconds = seconds
        self.pages = save.pages
        self.compression = save.compression
        self.written_pages = save.written_pages
        self.written_bytes = save.written_bytes
        self.segment_times = save.segment_times
        self.late_segments = save.late_segments
        self.throttled_seconds = save.throttled_seconds

    @property
    def pacing(self) -> Pacing:
        """For the report."""
        latencies = [seconds * 1e3 for _, seconds in self.segment_times]
        mean = sum(latencies) / len(latencies) if latencies else 0.0
        return Pacing(len(latencies), mean, max(latencies, default=0.0), self.late_segments, self.throttled_seconds)


def save_state(
    native: _native.Store,
    flat: FlatState,
    last: PagePlan | None,
    settings: Settings,
    *,
    device: Device,
    threads: int,
    bucket: _native.TokenBucket | None,
    parent: int,
    step: int | None,
    meta: dict[str, object],
    tags: Sequence[str],
) -> Saved:
    """Writes a flat state and commits it. Pages that commit ``parent`` has are referenced (0: all are written).
    ``last`` is the plan of an earlier save, which serves again where the chunks are the same. ``bucket`` caps the bytes
    a second, over all saves that it is given to.

    Raises:
        StoreIOError: The disk is full (nothing has changed, earlier commits are whole) or failed (the writer is
            poisoned).
    """
    start = time.perf_counter()
    sizes = settings.page_bytes, settings.pack_below_bytes
    plan = (last and last.again(flat, *sizes)) or plan_pages(flat, *sizes)
    manifest = native.manifest(parent) if parent else None
    save = None
    try:  # from here on, whatever happens (Ctrl-C too), the attempt is over and its files are gone
        save = _native.Save(native)
        moved = native.direct_bytes
        save.write(
            pointers=plan.pointers,
            lengths=plan.lengths,
            part_views=plan.part_views,
            part_offsets=plan.part_offsets,
            views=plan.views,
            parts_of_page=plan.parts_of_page,
            item_sizes=plan.item_sizes,
            floating=plan.floating,
            packed=plan.packed,
            parent=manifest,
            compression=settings.compression,
            device_rate=device.write,
            threads=threads,
            segment_bytes=settings.max_segment_size_mb << 20,
            flush_interval_ms=settings.flush_interval_ms,
            bucket=bucket,
            background=False,
            cancel=None,
            progress=None,
        )
        save.write_manifest(
            page_bytes=settings.page_bytes,
            chunks=plan.rows.view(np.uint8),
            dims=plan.chunks.dims.view(np.uint8),
            keys=plan.chunks.keys,
            state=flat.document,
        )
        save.flush()
        record = save.commit(
            step=step,
            meta=encode_meta(meta | {"io": _io(native, moved)}),
            tags=[tag.encode("utf-8", "surrogatepass") for tag in tags],
        )
    except StoreIOError as error:
        if error.errno in _OUT_OF_SPACE:
            raise _out_of_space(error, native, int(flat.chunks.nbytes.sum())) from error
        raise
    finally:
        if save is not None:
            save.abort()
    return Saved(record, plan, save, time.perf_counter() - start)


def _io(native: _native.Store, before: int) -> str:
    """Which way the pages went, for the commit's record."""
    if native.direct_bytes > before:
        return "direct"
    return f"buffered: {native.stepped_down}" if native.stepped_down else "buffered"


def _out_of_space(error: StoreIOError, native: _native.Store, needed: int) -> StoreIOError:
    free = native.free_bytes
    return StoreIOError(
        error.errno,
        f"{error.strerror}: the save was given up and removed; earlier commits are whole. The state has {needed:,} "
        f"bytes, of which what changed has to fit, compressed, and {free:,} are free now. Free some space, or drop old "
        f"commits with `tierload gc --keep N`",
        error.filename,
    )
