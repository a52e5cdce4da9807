"""Values that describe tensors on their way to and from pages."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ChunkInfo", "ChunkSource", "Destination", "FlatState", "LoadReport"]


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """The bytes of one chunk in memory, as a save reads them.

    ``pointer`` addresses ``nbytes`` contiguous bytes, which stay valid and unchanged while ``owner`` is alive; with
    ``strides`` (in bytes, one for each of ``sizes``) it addresses the first of elements that lie apart.
    ``shape``, ``offsets`` and ``sizes`` are the whole tensor's shape, this chunk's offsets in it and its sizes, in
    elements. ``dtype`` is the code of docs/FORMAT.md section 6.
    """

    key: str
    dtype: int
    item_size: int
    floating: bool
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pointer: int
    nbytes: int
    owner: object
    strides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as the store keeps it: chunks sorted by key (UTF-8 byte order), and the JSON document that refers to them
    by number (docs/FORMAT.md section 8). ``notes`` are remarks for the user, such as layouts that are not restored."""

    chunks: tuple[ChunkSource, ...]
    document: bytes
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One chunk as a manifest lists it: what a load knows before it reads a byte of data."""

    number: int
    key: str
    dtype: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a load puts the ``nbytes`` bytes of chunk ``chunk``: ``pointer``, valid while ``owner`` is alive."""

    chunk: int
    pointer: int
    nbytes: int
    owner: object


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What ``load(into=..., strict=False)`` did: keys filled, and what did not match. Every field holds keys."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
