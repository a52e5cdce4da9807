"""Verification of commits: everything that can be wrong on disk is found, located and named; nothing is repaired."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tierload import _native
from tierload.catalog import CatalogView
from tierload.engine.loading import table_of
from tierload.errors import CorruptStore
from tierload.layout import ManifestTable, segment_sizes
from tierload.types import Commit, Damage, VerifyReport

__all__ = ["verify"]

_BATCH = 32  # pages between two reports of progress
_MIRROR = ".m"


def _named(commits: list[Commit]) -> str:
    return ", ".join(f"{c.id[:12]} (step {c.step})" for c in commits)


class _Verification:
    """Damages so far. A page or segment that several commits share is read and reported once, with all of them."""

    def __init__(self, native: _native.Store, threads: int, progress: Callable[[int], None] | None) -> None:
        self._native = native
        self._threads = threads
        self._progress = progress
        self.pages = 0
        self.bytes = 0
        self.bad: set[str] = set()  # ids of commits that cannot be loaded in full
        self._damages: list[tuple[Damage, list[Commit]]] = []
        self._segments: dict[str, list[Commit]] = {}  # damaged ones
        self._places: dict[tuple[str, int], list[Commit] | None] = {}  # pages that were read; None: good

    def store(self, text: str) -> None:
        """Damage that concerns no one commit."""
        self._damages.append((Damage(text), []))

    def manifest(self, commit: Commit) -> _native.Manifest | None:
        """Both copies of a commit's manifest; the open manifest when one copy serves."""
        problems = self._native.check_manifests(commit.txid)
        path = self._native.manifest_path(commit.txid)
        for problem, copy in zip(problems, (path, path + _MIRROR), strict=True):
            if problem:
                rest = "" if all(problems) else " (the other copy is whole and is used)"
                self._damages.append((Damage(problem + rest, path=copy), [commit]))
        if not all(problems):
            try:
                return self._native.manifest(commit.txid)
            except CorruptStore as error:  # as it was written, and yet it contradicts itself
                self._damages.append((Damage(str(error), path=path), [commit]))
        self.bad.add(commit.id)
        return None

    def segments(self, commit: Commit, manifest: _native.Manifest) -> list[str]:
        """That a commit's segments are there with their sizes; their paths."""
        paths = []
        for number, size in enumerate(segment_sizes(manifest.segments)):
            path = manifest.segment_path(number)
            paths.append(path)
            if path in self._segments:
                self._segments[path].append(commit)
                self.bad.add(commit.id)
                continue
            found = self._native.segment_size(path)
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes instead of {size}"
                self._segments[path] = [commit]
                self._damages.append((Damage(f"{path} {what}", path=path), self._segments[path]))
                self.bad.add(commit.id)
        return paths

    def read(self, commit: Commit, manifest: _native.Manifest, table: ManifestTable, paths: list[str]) -> None:
        """Every page of a commit that no commit before it had, to the last byte."""
        fresh = []
        for page, place in enumerate(_places(table, paths)):
            if place not in self._places and place[0] not in self._segments:
                self._places[place] = None
                fresh.append(page)
        for start in range(0, len(fresh), _BATCH):
            batch = np.array(fresh[start : start + _BATCH], np.uint32)
            for page, path, offset, what in manifest.check(pages=batch, threads=self._threads, progress=None):
                keys = tuple(table.chunks.key(number) for number in table.page_owner(page))
                commits: list[Commit] = []
                self._places[path, offset] = commits
                self._damages.append((Damage(what, keys=keys, page=page, path=path, offset=offset), commits))
            size = int(table.pages["stored_length"][batch].sum())
            self.pages += len(batch)
            self.bytes += size
            if self._progress:
                self._progress(size)

    def damaged_pages(self) -> bool:
        """Whether a page was found damaged."""
        return any(commits is not None for commits in self._places.values())

    def share(self, commit: Commit) -> None:
        """Adds a commit to the damaged pages that it has too, whether or not it was asked for."""
        try:
            manifest = self._native.manifest(commit.txid)
        except CorruptStore:  # which was found before
            return
        paths = [manifest.segment_path(number) for number in range(len(segment_sizes(manifest.segments)))]
        for place in _places(table_of(manifest), paths):
            commits = self._places.get(place)
            if commits is not None and commit not in commits:
                commits.append(commit)
                self.bad.add(commit.id)

    def damages(self) -> tuple[Damage, ...]:
        """Everything that was found, with the commits that it concerns."""
        return tuple(
            replace(
                damage,
                message=_message(damage, commits),
                commits=tuple(c.id for c in commits),
                steps=tuple(c.step for c in commits),
            )
            for damage, commits in self._damages
        )


def _places(table: ManifestTable, paths: list[str]) -> list[tuple[str, int]]:
    segments, offsets = table.pages["segment"].tolist(), table.pages["offset"].tolist()
    return [(paths[segment], offset) for segment, offset in zip(segments, offsets, strict=True)]


def _message(damage: Damage, commits: list[Commit]) -> str:
    if not commits:
        return damage.message
    where = f"commit {_named(commits)}: "
    if damage.page >= 0:
        key = f"key {', '.join(damage.keys)}" if len(damage.keys) <= 3 else f"{len(damage.keys)} small tensors"
        where += f"{key}, page {damage.page}, {damage.path} at byte {damage.offset}: "
    return where + damage.message


def verify(
    native: _native.Store,
    view: CatalogView,
    *,
    full: bool,
    commit: Commit | None,
    threads: int,
    progress: Callable[[int], None] | None,
    exists: Callable[[Commit], bool],
) -> VerifyReport:
    """Checks the metadata of every commit and the pages of the head; with ``full`` those of every commit, with
    ``commit`` those of that one. ``exists`` tells whether a commit whose files are gone was dropped meanwhile."""
    start = time.perf_counter()
    run = _Verification(native, threads, progress)
    for text in [*native.warnings, *([native.damage] if native.damage else [])]:
        run.store(text)
    try:
        for text in native.history_warnings():
            run.store(text)
    except CorruptStore as error:
        run.store(str(error))
    wanted = commit or view.head
    read = []
    for each in view.commits:
        if any(native.check_manifests(each.txid)) and not exists(each):
            continue
        if full or each == wanted:
            read.append(each.id)
        manifest = run.manifest(each)
        if manifest is None:
            continue
        paths = run.segments(each, manifest)
        if each.id in read[-1:]:
            run.read(each, manifest, table_of(manifest), paths)
    if run.damaged_pages():
        for each in view.commits:
            run.share(each)
    return VerifyReport(
        commits=len(view.commits),
        pages=run.pages,
        bytes=run.bytes,
        seconds=time.perf_counter() - start,
        full=full,
        damages=run.damages(),
        read=tuple(read),
        whole=tuple(id for id in read if id not in run.bad),
    )
