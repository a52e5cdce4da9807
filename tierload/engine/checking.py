"""Verification of commits: everything that can be wrong on disk is found, located and named; nothing is repaired."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.catalog import CatalogView
from tierload.engine.inventory import Fault, Inventory, Root
from tierload.engine.loading import table_of
from tierload.errors import CorruptStore
from tierload.layout import ManifestTable, segment_sizes
from tierload.types import Commit, Damage, VerifyReport

__all__ = ["verify"]

_BATCH = 32  # pages between two reports of progress
_MIRROR, _ROOT = ".m", ".root"


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
        self._incomplete: set[str] = set()  # ids of commits of which a shard cannot be opened
        self._newer: tuple[Commit, npt.NDArray[np.int64]] | None = None  # on the head's line, and its version vector
        self._metadata: dict[str, list[Commit]] = {}  # damaged root files and shards
        self._segments: dict[str, list[Commit]] = {}  # damaged ones
        self._places: dict[tuple[str, int], list[Commit] | None] = {}  # pages that were read; None: good

    def store(self, text: str) -> None:
        """Damage that concerns no one commit."""
        self._damages.append((Damage(text), []))

    def problems(self, commit: Commit) -> list[tuple[str, str, str]]:
        """What is wrong with the copies of a commit's root file and shards: path, and of the copy and its mirror."""
        try:
            return self._native.check_manifests(commit.txid)
        except CorruptStore:  # the root contradicts itself, which reading it says
            return []

    def shards(self, commit: Commit, problems: list[tuple[str, str, str]]) -> Iterator[tuple[int, _native.Manifest]]:
        """Both copies of a commit's root file and shards; then the shards of which one copy serves, by rank."""
        for path, first, mirror in problems:
            self._copies(commit, path, first, mirror)
        lost = {path for path, first, mirror in problems if first and mirror}
        try:
            root = Root(self._native, commit)
        except CorruptStore as error:
            if not lost:
                self._damages.append((Damage(str(error)), [commit]))
            self._lacks_shards(commit)
            return
        self._follow(commit, root)
        for rank in range(commit.ranks):
            path = root.path(rank)
            try:
                manifest = None if path in lost else root.open(rank)
            except CorruptStore as error:  # as it was written, and yet it contradicts itself
                self._damages.append((Damage(str(error), path=path, rank=_rank(commit, rank)), [commit]))
                manifest = None
            if manifest is None:
                self._lacks_shards(commit)
            else:
                yield rank, manifest

    def _copies(self, commit: Commit, path: str, first: str, mirror: str) -> None:
        if path in self._metadata:  # a shard that another commit has too
            self._metadata[path].append(commit)
            return
        self._metadata[path] = [commit]
        suffix = path.rpartition(".r")[2]
        rank = -1 if path.endswith(_ROOT) else _rank(commit, int(suffix, 16))
        for problem, copy in ((first, path), (mirror, path + _MIRROR)):
            if problem:
                rest = "" if first and mirror else " (the other copy is whole and is used)"
                self._damages.append((Damage(problem + rest, path=copy, rank=rank), self._metadata[path]))

    def _lacks_shards(self, commit: Commit) -> None:
        self.bad.add(commit.id)
        self._incomplete.add(commit.id)

    def _follow(self, commit: Commit, root: Root) -> None:
        """That no rank's shard is newer than in the commit that comes after this one on the head's line. Commits come
        newest first."""
        if commit.superseded:
            return
        if self._newer is not None and self._newer[0].ranks == commit.ranks > 1:
            newer, vector = self._newer
            for rank in np.flatnonzero(vector < root.vector).tolist():
                what = (
                    f"the shard of rank {rank} is of transaction {vector[rank]}, and of {root.vector[rank]} in "
                    f"{_named([commit])}, which comes before it: the version vector goes back"
                )
                self._damages.append((Damage(what, rank=rank), [newer]))
                self.bad.add(newer.id)
        self._newer = commit, root.vector

    def state(self, commit: Commit) -> None:
        """That what the shards hold is what the documents of the ranks say, and makes up whole tensors."""
        if commit.ranks == 1 or commit.id in self._incomplete:
            return
        root = Root(self._native, commit)
        try:
            faults = list(Inventory(commit, root.open).faults())
        except CorruptStore as error:
            faults = [Fault(-1, "", str(error))]
        for fault in faults:
            keys = (fault.key,) if fault.key else ()
            path = root.path(fault.rank) if fault.rank >= 0 else ""
            self._damages.append((Damage(fault.text, keys=keys, path=path, rank=fault.rank), [commit]))
            self.bad.add(commit.id)

    def segments(self, commit: Commit, rank: int, manifest: _native.Manifest) -> list[str]:
        """That the segments of a shard are there with their sizes; their paths."""
        paths = []
        for number, size in enumerate(segment_sizes(manifest.segments)):
            path = manifest.segment_path(number)
            paths.append(path)
            if path in self._segments:
                if commit not in self._segments[path]:
                    self._segments[path].append(commit)
                self.bad.add(commit.id)
                continue
            found = self._native.segment_size(path)
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes instead of {size}"
                self._segments[path] = [commit]
                damage = Damage(f"{path} {what}", path=path, rank=_rank(commit, rank))
                self._damages.append((damage, self._segments[path]))
                self.bad.add(commit.id)
        return paths

    def read(self, commit: Commit, rank: int, manifest: _native.Manifest, paths: list[str]) -> None:
        """Every page of a shard that none before it had, to the last byte."""
        table = table_of(manifest)
        fresh = []
        for page, place in enumerate(_places(table, paths)):
            if place not in self._places and place[0] not in self._segments:
                self._places[place] = None
                fresh.append(page)
        for start in range(0, len(fresh), _BATCH):
            batch = np.array(fresh[start : start + _BATCH], np.uint32)
            for page, path, offset, what in manifest.check(pages=batch, threads=self._threads, progress=None):
                keys = tuple(dict.fromkeys(table.chunks.key(number) for number in table.page_owner(page)))
                commits: list[Commit] = []
                self._places[path, offset] = commits
                damage = Damage(what, keys=keys, page=page, path=path, offset=offset, rank=_rank(commit, rank))
                self._damages.append((damage, commits))
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
            root = Root(self._native, commit)
        except CorruptStore:  # which was found before
            return
        for rank in range(commit.ranks):
            try:
                manifest = root.open(rank)
            except CorruptStore:  # likewise
                continue
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


def _rank(commit: Commit, rank: int) -> int:
    """A rank as a damage names it: not where there is only one."""
    return rank if commit.ranks > 1 else -1


def _places(table: ManifestTable, paths: list[str]) -> list[tuple[str, int]]:
    segments, offsets = table.pages["segment"].tolist(), table.pages["offset"].tolist()
    return [(paths[segment], offset) for segment, offset in zip(segments, offsets, strict=True)]


def _message(damage: Damage, commits: list[Commit]) -> str:
    if not commits:
        return damage.message
    where = f"commit {_named(commits)}: "
    if damage.rank >= 0 and not damage.message.startswith(f"the shard of rank {damage.rank} "):
        where += f"rank {damage.rank}: "
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
    """Checks the metadata of every commit, of all ranks, and the pages of the head; with ``full`` those of every
    commit, with ``commit`` those of that one. ``exists`` tells whether a commit was dropped meanwhile."""
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
        problems = run.problems(each)
        if problems and not exists(each):
            continue
        reads = full or each == wanted
        if reads:
            read.append(each.id)
        for rank, manifest in run.shards(each, problems):
            paths = run.segments(each, rank, manifest)
            if reads:
                run.read(each, rank, manifest, paths)
        run.state(each)
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
