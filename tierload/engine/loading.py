"""A load: open the manifest → plan where bytes go → read, check and decode → hand out."""

from __future__ import annotations

import numpy as np

from tierload import _native
from tierload.errors import CorruptPage
from tierload.layout import ManifestTable, ReadPlan
from tierload.state import LoadPlan
from tierload.types import Commit

__all__ = ["fill", "table_of"]


def table_of(manifest: _native.Manifest) -> ManifestTable:
    """The tables of an open manifest."""
    return ManifestTable(manifest.pages, manifest.chunks, manifest.dims, manifest.keys)


def fill(manifest: _native.Manifest, table: ManifestTable, plan: LoadPlan, commit: Commit, threads: int) -> None:
    """Reads every destination of a plan and verifies every page that this touches.

    Raises:
        CorruptPage: A page is damaged. It names the commit, key, page, file and offset, and which keys of the target
            had been overwritten by then.
    """
    reads = table.plan_reads(plan.destinations)
    touched = np.zeros(len(reads.pages), np.uint8)
    try:
        manifest.read(
            pages=reads.pages,
            offsets=reads.offsets,
            pointers=reads.pointers,
            lengths=reads.lengths,
            threads=threads,
            touched=touched,
            progress=None,
        )
    except CorruptPage as error:
        raise _located(error, table, plan, commit, _overwritten(plan, reads, touched)) from None


def _overwritten(plan: LoadPlan, reads: ReadPlan, touched: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[str]:
    """Keys of the target's own memory that a failed load had written to."""
    owners = np.unique(reads.owners[touched != 0]).tolist()
    chunks = {int(plan.destinations.chunks[owner]) for owner in owners} & plan.in_place
    return sorted({key for chunk in chunks for key in plan.keys_of(chunk)})


def _located(
    error: CorruptPage, table: ManifestTable, plan: LoadPlan, commit: Commit, overwritten: list[str]
) -> CorruptPage:
    keys = [table.chunks.key(number) for number in table.page_owner(error.page)]
    wanted = {key for number in table.page_owner(error.page) for key in plan.keys_of(number)}
    key = min(wanted) if wanted else (keys[0] if keys else "")
    others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    changed = f" Of the target, these keys had been overwritten: {', '.join(overwritten)}." if overwritten else ""
    return CorruptPage(
        f"commit {commit.id[:12]} (step {commit.step}), key {key!r}{others}: {error}.{changed} "
        f"Other commits may hold a whole copy: `tierload verify --full` says which; then load or roll back to one",
        commit=commit.id,
        key=key,
        page=error.page,
        path=error.path,
        offset=error.offset,
        overwritten=overwritten,
    )
