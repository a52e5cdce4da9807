"""Values that describe commits and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "Balance",
    "Change",
    "CollectReport",
    "Commit",
    "Damage",
    "Difference",
    "Pacing",
    "RollbackPlan",
    "SaveReport",
    "ShardInfo",
    "VerifyReport",
]


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit. ``id`` is 32 hexadecimal digits; ``parent`` and ``source`` are ids or None.

    ``time`` is seconds since 1970 and never used for ordering; ``lsn`` and ``txid`` are. ``raw_bytes`` is the size of
    the state, ``written_bytes`` what this commit added to segments. ``superseded`` is true when a rollback has left
    the commit behind: it is not an ancestor of the head. ``io`` is the way that its pages went to the disk: ``direct``,
    past the page cache, or ``buffered``, with the reason where direct I/O is refused. ``ranks`` is how many ranks of a
    job have written it together.
    """

    id: str
    txid: int
    lsn: int
    step: int | None
    parent: str | None
    source: str | None
    time: float
    raw_bytes: int
    written_bytes: int
    superseded: bool
    head: bool
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, object] = field(default_factory=dict, compare=False)  # a nan is not equal to itself
    note: str = ""
    io: str = ""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Change:
    """One record of the journal, for people: what ``Store.history()`` yields, newest first.

    ``kind`` is ``commit``, ``rollback``, ``change``, ``tag``, ``collect`` or ``snapshot``.
    """

    lsn: int
    kind: str
    time: float
    key: str = ""
    before: object = None
    after: object = None
    step: int | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Pacing:
    """How steadily a save wrote its ``segments`` (a count). Latency is from a segment's first byte until it was
    durable, in milliseconds (0 when no segment was written); ``late_segments`` took longer than ``flush_interval_ms``.
    ``throttled_seconds`` is what the save waited for ``bandwidth_cap_mbps``."""

    segments: int
    latency_ms_mean: float
    latency_ms_max: float
    late_segments: int
    throttled_seconds: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. ``seconds`` is from the call until it was durable, ``waited_seconds`` how long it held its
    caller up: all of it, or, of a save in the background, the call and the optimizer's steps that waited for the copy.
    ``pages`` counts the state's, ``written_pages`` those that were not yet in the store. ``compression`` is the one
    that was used, if any page had to be written; ``pacing`` says how its segments got to the disk."""

    commit: Commit
    seconds: float
    raw_bytes: int
    written_bytes: int
    pages: int
    written_pages: int
    path: str
    compression: str
    pacing: Pacing
    notes: tuple[str, ...] = ()
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What one rank's shard of a commit holds. ``txid`` is that of the transaction that last changed it, the rank's
    element of the commit's version vector. ``raw_bytes`` and ``chunks`` are of the parts of tensors that the rank has
    written, ``stored_bytes`` and ``pages`` what these have on disk, with what is shared; ``own_values`` counts the
    values that are the rank's own, tensors or not."""

    rank: int
    txid: int
    raw_bytes: int
    stored_bytes: int
    pages: int
    chunks: int
    own_values: int


@dataclass(frozen=True, slots=True)
class Balance:
    """How a plan has dealt out the writing of what several ranks had the same: ``load`` is the heaviest rank's bytes
    over the mean of all, ``cuts`` how many parts more than tensors there are, and ``cuts_saved`` how many less than
    where each rank gets an equal run of bytes."""

    load: float
    cuts: int
    cuts_saved: int


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What ``Store.collect`` dropped (or would drop), the files and bytes that were freed, and how many manifests a
    reader still holds, whose data therefore stays for now."""

    dropped: tuple[Commit, ...]
    removed_files: int = 0
    freed_bytes: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that ``verify`` found wrong, and all commits that it concerns (none: the store itself).

    Of a page: ``keys`` that have bytes in it, its number ``page`` in the manifest, and where it lies. Of metadata only
    ``path`` is set. ``rank`` is the one whose shard it is in, of a commit by several.
    """

    message: str
    commits: tuple[str, ...] = ()
    steps: tuple[int | None, ...] = ()
    keys: tuple[str, ...] = ()
    page: int = -1
    path: str = ""
    offset: int = -1
    rank: int = -1


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of ``Store.verify``: counts of what was read, and every damage. ``ok`` is ``not damages``.

    ``read`` are the ids of the commits whose pages were read, newest first; those of them that can be loaded in full
    are ``whole``.
    """

    commits: int
    pages: int
    bytes: int
    seconds: float
    full: bool
    damages: tuple[Damage, ...] = ()
    read: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.damages


@dataclass(frozen=True, slots=True)
class Difference:
    """``Store.diff(a, b)``: keys by what happened to them, and how many bytes of pages differ."""

    a: str
    b: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: int
    changed_bytes: int
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """What a rollback will do, or did: from ``head`` to ``target``; ``superseded`` commits are left behind (and stay);
    ``values`` lists the recorded keys that go back. A dry run has the ``difference`` of the two; a rollback that was
    done has the new ``commit``."""

    head: Commit
    target: Commit
    superseded: tuple[Commit, ...]
    values: tuple[str, ...]
    difference: Difference | None = None
    commit: Commit | None = None
