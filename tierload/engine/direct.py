"""Raw pages between a store's files and accelerators, past the processor: where that is possible, and the faster."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from tierload import _native, gds
from tierload.engine import devices
from tierload.engine.accelerators import present, synchronize
from tierload.gds.probe import probe
from tierload.layout import ManifestTable, ReadPlan

__all__ = ["choose_way", "read_pages", "written_pages"]

Write = Callable[[str, Sequence[tuple[int, int, int]]], None]
"""Writes pages of an accelerator: into which segment, and offset, address and length of each."""


def choose_way(path: str, ring: devices.Device) -> gds.Choice:
    """Which way saves and loads of what accelerators have go. Where kvikio can move data directly it is tried once on
    each file system, in a process of its own, and compared with the ``ring``: pinned memory and the device's rates."""
    why = gds.refusal()
    if why:
        return gds.Choice("ring", "ring", f"ring: {why}")
    found = devices.remembered_way(path) or devices.remember_way(path, probe(path))
    return gds.choose(found, ring.write, ring.read)


@contextmanager
def written_pages(path: str, way: gds.Choice | None) -> Iterator[Write | None]:
    """How a save writes raw pages of accelerators; None: they come to the processor."""
    if way is None or way.save != "gds":
        yield None
        return
    with gds.GdsFiles() as files:

        def write(segment: str, extents: Sequence[tuple[int, int, int]]) -> None:
            files.write(os.path.join(path, segment), [gds.Extent(*extent) for extent in extents])

        yield write


def read_pages(
    path: str, manifest: _native.Manifest, table: ManifestTable, reads: ReadPlan, there: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Reads the raw pages that go whole into the memory of accelerators ``there``; 1 for each part that is one. They
    are not verified.

    Raises:
        StoreIOError: A segment cannot be read.
    """
    rows = table.pages[reads.pages]
    alone = np.ones(len(reads.pages), np.bool_)
    again = reads.pages[1:] == reads.pages[:-1]
    alone[1:] &= ~again
    alone[:-1] &= ~again
    landed: npt.NDArray[np.bool_] = alone & (there != 0) & (rows["codec"] == 0) & (reads.lengths == rows["raw_length"])
    by_segment: defaultdict[int, list[gds.Extent]] = defaultdict(list)
    for number in np.flatnonzero(landed).tolist():
        row = rows[number]
        extent = gds.Extent(int(row["offset"]), int(reads.pointers[number]), int(row["raw_length"]))
        by_segment[int(row["segment"])].append(extent)
    synchronize(present(there))  # whatever used this memory before
    with gds.GdsFiles() as files:
        for segment, extents in by_segment.items():
            files.read(os.path.join(path, manifest.segment_path(segment)), extents)
    return landed.astype(np.uint8)
