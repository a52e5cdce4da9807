"""Verification of commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tierload import _native
from tierload.catalog import CatalogView
from tierload.engine.loading import table_of
from tierload.errors import CorruptStore
from tierload.layout import ManifestTable
from tierload.types import Commit, Damage, VerifyReport

__all__ = ["verify"]

_BATCH = 512  # pages that are checked between two reports of progress


class _Verification:
    """Damages so far, by place, so that a page that several commits share is read and reported once."""

    def __init__(self, native: _native.Store, view: CatalogView, threads: int) -> None:
        self.native = native
        self.view = view
        self.threads = threads
        self.pages = 0
        self.bytes = 0
        self._metadata: list[Damage] = []
        self._found: dict[tuple[str, int], tuple[Damage, list[Commit]]] = {}
        self._seen: dict[tuple[str, int], bool] = {}

    def metadata(self, commit: Commit) -> None:
        """Both copies of the manifest, and that its segments are there with their sizes."""
        for problem in self.native.check_manifests(commit.txid):
            if problem:
                self._add(Damage(f"{problem} (its mirror is used while it is whole)", (commit.id,), (commit.step,)))

    def _add(self, damage: Damage) -> None:
        self._metadata.append(damage)

    def data(self, commit: Commit, full: bool, progress: Callable[[int], None] | None) -> None:
        """Segments, and with ``full`` every page that no earlier commit had."""
        try:
            manifest = self.native.manifest(commit.txid)
        except CorruptStore as error:
            self._add(Damage(str(error), (commit.id,), (commit.step,)))
            return
        table = table_of(manifest)
        paths = []
        sizes = np.frombuffer(manifest.segments, "<u8").reshape(-1, 4)[:, 3].tolist()
        for number, size in enumerate(sizes):
            path = manifest.segment_path(number)
            paths.append(path)
            found = self.native.segment_size(path)
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes instead of {size}"
                self._add(Damage(f"{path} {what}", (commit.id,), (commit.step,), path=path))
        if full:
            self._pages(commit, manifest, table, paths, progress)

    def _pages(
        self,
        commit: Commit,
        manifest: _native.Manifest,
        table: ManifestTable,
        paths: Sequence[str],
        progress: Callable[[int], None] | None,
    ) -> None:
        fresh = []
        segments, offsets = table.pages["segment"].tolist(), table.pages["offset"].tolist()
        for page, (segment, offset) in enumerate(zip(segments, offsets, strict=True)):
            place = (paths[segment], offset)
            if place in self._found:
                self._found[place][1].append(commit)
            if place not in self._seen:
                self._seen[place] = True
                fresh.append(page)
        for start in range(0, len(fresh), _BATCH):
            batch = np.array(fresh[start : start + _BATCH], np.uint32)
            for page, path, offset, what in manifest.check(pages=batch, threads=self.threads, progress=None):
                keys = [table.key(number) for number in table.page_owner(page)]
                damage = Damage(what, key=", ".join(keys), page=page, path=path, offset=offset)
                self._found[path, offset] = (damage, [commit])
            read = int(table.pages["stored_length"][batch].sum())
            self.pages += len(batch)
            self.bytes += read
            if progress:
                progress(read)

    def damages(self) -> tuple[Damage, ...]:
        out = list(self._metadata)
        for damage, commits in self._found.values():
            named = ", ".join(f"{c.id[:12]} (step {c.step})" for c in commits)
            out.append(
                Damage(
                    f"commit {named}: key {damage.key}, page {damage.page}, {damage.path} at byte {damage.offset}: "
                    f"{damage.message}",
                    tuple(c.id for c in commits),
                    tuple(c.step for c in commits),
                    damage.key,
                    damage.page,
                    damage.path,
                    damage.offset,
                )
            )
        return tuple(out)


def verify(
    native: _native.Store,
    view: CatalogView,
    *,
    full: bool,
    commit: Commit | None,
    threads: int,
    progress: Callable[[int], None] | None,
) -> VerifyReport:
    """Checks the metadata of every commit and the pages of the head; with ``full`` those of every commit, with
    ``commit`` those of that one. ``progress`` is called with the number of bytes that were read."""
    start = time.perf_counter()
    run = _Verification(native, view, threads)
    for text in [*native.warnings, *([native.damage] if native.damage else [])]:
        run._add(Damage(text))
    try:
        native.history(0)
    except CorruptStore as error:
        run._add(Damage(f"history: {error}"))
    for each in view.commits:
        run.metadata(each)
        run.data(each, full or each == (commit or view.head), progress)
    return VerifyReport(
        commits=len(view.commits),
        pages=run.pages,
        bytes=run.bytes,
        seconds=time.perf_counter() - start,
        full=full,
        damages=run.damages(),
    )
