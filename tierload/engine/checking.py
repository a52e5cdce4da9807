"""Verification and comparison of commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tierload import _native
from tierload.catalog import CatalogView
from tierload.engine.loading import table_of
from tierload.errors import CorruptStore, InvalidRequest
from tierload.layout import ManifestTable
from tierload.types import Commit, Damage, Difference, VerifyReport

__all__ = ["compare", "verify"]

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


def compare(native: _native.Store, a: Commit, b: Commit) -> Difference:
    """What changed from commit ``a`` to ``b``, by the digests of their pages: no page is read."""
    old, new = (_digests(native, commit) for commit in (a, b))
    changed = [key for key in old.keys() & new.keys() if old[key][0] != new[key][0]]
    added, removed = new.keys() - old.keys(), old.keys() - new.keys()
    values_a, values_b = (_values_at(native, commit) for commit in (a, b))
    values = {key for key in values_a.keys() | values_b.keys() if values_a.get(key) != values_b.get(key)}
    return Difference(
        a=a.id,
        b=b.id,
        added=tuple(sorted(added)),
        removed=tuple(sorted(removed)),
        changed=tuple(sorted(changed)),
        unchanged=len(old.keys() & new.keys()) - len(changed),
        changed_bytes=sum(new[key][1] for key in [*changed, *added]),
        values=tuple(sorted(key.decode("utf-8", "surrogatepass") for key in values)),
    )


def _digests(native: _native.Store, commit: Commit) -> dict[str, tuple[object, int]]:
    table = table_of(native.manifest(commit.txid))
    return {
        info.key: ((info.dtype, info.shape, info.sizes, table.raw_digests(info.number)), info.nbytes)
        for info in table.infos()
    }


def _values_at(native: _native.Store, commit: Commit) -> dict[bytes, bytes]:
    try:
        return dict(native.state_at(commit.lsn)[1])
    except InvalidRequest:  # older than the history that is kept
        return {}
