"""The documents of a state that several ranks hold: one that is true of all of them, and one of each rank's own values
(docs/FORMAT.md section 8); written from units, and read into the form that a single rank's state has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tierload.errors import CorruptStore, UnsupportedFormat
from tierload.state.cutting import Cut
from tierload.state.dtypes import BY_CODE
from tierload.state.keys import ROOT
from tierload.state.nodes import DAMAGE, tag_of
from tierload.state.references import References
from tierload.state.scalars import sized
from tierload.state.slots import Slot, chunk_places, slots
from tierload.state.texts import parse
from tierload.types import ChunkTable, FlatState, Layout, Mesh, Placement

__all__ = ["Listed", "StoredTensor", "WholeState", "listed", "own_keys", "read_documents", "write_documents"]

_INT64_MAX = (1 << 63) - 1

Part = tuple[int, int, int]
"""Rows from, to, and the replica that has written them; all rows as they are: ``(0, -1, replica)``."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a state that several ranks hold. Without a ``layout`` every rank has all of it, and replica ``n`` is
    rank ``n``; ``owner`` is the rank whose own value it is, or -1."""

    key: str
    dtype: int
    shape: tuple[int, ...]
    layout: Layout | None
    parts: tuple[Part, ...]
    nbytes: int
    owner: int = -1


@dataclass(frozen=True, slots=True)
class WholeState:
    """What one rank sees of a state: its document in the form of a single rank's, and its tensors as whole chunks.
    ``own`` are the keys of values that are each rank's own: here, those of ``owner``."""

    document: bytes
    chunks: ChunkTable
    tensors: tuple[StoredTensor, ...]
    own: tuple[str, ...]
    owner: int


@dataclass(frozen=True, slots=True)
class Listed:
    """What one rank's document lists: ``tensors``, in that of rank 0 first those of all ranks (``owner`` -1), then its
    own; and how many own values it has, with tensors or not."""

    tensors: tuple[StoredTensor, ...]
    own_values: int


# Writing


def write_documents(
    whole: Cut, is_own: Sequence[bool], flat: FlatState, parts: Mapping[int, Sequence[Part]] | None, ranks: int
) -> bytes:
    """A rank's document. ``is_own`` says of each unit whether it is each rank's own. Rank 0's document has besides what
    is true of all of them: ``parts`` says who writes what of each chunk of that (by its number in ``flat``). ``whole``
    is used up."""
    nodes = [unit.node for unit in whole.units]
    own_nodes = [node for node, alone in zip(nodes, is_own, strict=True) if alone]
    holder, places = _placed(whole.frame, nodes)
    if b'"ref"' in flat.document:
        References(holder[0], nodes).make_absolute()
        References(holder[0], own_nodes).make_relative()
    own, shared = _Tensors(flat, None), _Tensors(flat, parts)
    count = 0
    for unit, alone, (container, key) in zip(whole.units, is_own, places, strict=True):
        if alone or parts is not None:
            tensors = own if alone else shared
            numbers = [tensors.number(chunk) for chunk in unit.chunks]
            for place in chunk_places(unit.node):
                place["chunk"] = numbers[place["chunk"]]
                if "tie" in place:
                    place["tie"] = place["chunk"]
        if alone:
            container[key] = {"own": count}
            count += 1
    text: dict[str, object] = {"version": 1}
    if parts is not None:
        meshes = [[mesh.shape, mesh.ranks, mesh.names] for mesh in shared.meshes]
        text |= {"ranks": ranks, "root": holder[0], "meshes": meshes, "tensors": shared.rows}
    text |= {"own": own_nodes, "own_tensors": own.rows}
    return json.dumps(text, separators=(",", ":")).encode("ascii")


class _Tensors:
    """Tensors that a document lists, in the order in which it names them."""

    def __init__(self, flat: FlatState, parts: Mapping[int, Sequence[Part]] | None) -> None:
        self.rows: list[list[object]] = []
        self.meshes: dict[Mesh, int] = {}
        self._flat = flat
        self._parts = parts
        self._numbers: dict[int, int] = {}

    def number(self, chunk: int) -> int:
        """The number by which a chunk is named."""
        if chunk not in self._numbers:
            self._numbers[chunk] = len(self.rows)
            info, spread = self._flat.chunks.info(chunk), self._flat.sharded.get(chunk)
            if self._parts is None:
                self.rows.append([info.key, info.dtype, info.shape])
            elif spread is None:
                self.rows.append([info.key, info.dtype, info.shape, self._parts[chunk], None, None])
            else:
                mesh = self.meshes.setdefault(spread.layout.mesh, len(self.meshes))
                row = [info.key, info.dtype, spread.shape, self._parts[chunk], mesh, spread.layout.placements]
                self.rows.append(row)
        return self._numbers[chunk]


def _placed(frame: object, nodes: Sequence[object]) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The frame, in a list by itself, with nodes in the places of the units; and where those are."""
    holder = [frame]
    places: list[tuple[Any, Any]] = [(None, None)] * len(nodes)
    stack: list[Slot] = [(holder, 0, ROOT)]
    while stack:
        container, key, path = stack.pop()
        tag, content = tag_of(container[key])
        if tag == "unit":
            container[key] = nodes[content]
            places[content] = container, key
        elif tag:
            stack.extend(slots(container[key], path))
    return holder, places


# Reading


def read_documents(shared: bytes, own: bytes | None, owner: int) -> WholeState:
    """A state as rank ``owner`` has saved it; ``own`` is the document of its shard, or None when it is rank 0's.

    Raises:
        CorruptStore: A document is damaged, or the two do not belong together.
    """
    with _damage_named("a commit by several ranks"):
        return _read(shared, own, owner)


@contextmanager
def _damage_named(whose: str) -> Iterator[None]:
    """Whatever the content of a document makes Python raise is damage of it."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, (CorruptStore, UnsupportedFormat)):
            raise
        raise CorruptStore(f"the state document of {whose} is damaged: {error!r}") from error


def listed(document: bytes, rank: int) -> Listed:
    """What the document of a rank's shard lists, without a look at what the values are.

    Raises:
        CorruptStore: It is damaged.
    """
    with _damage_named(f"rank {rank}"):
        mine = _parsed(document) if rank > 0 else _parsed(document, "ranks", "root", "meshes", "tensors")
        tensors = [] if rank > 0 else _shared_tensors(mine)
        tensors += [_own_tensor(row, rank) for row in sized(mine["own_tensors"])]
        return Listed(tuple(tensors), len(sized(mine["own"])))


def own_keys(shared: bytes) -> tuple[str, ...]:
    """Where in a state values stand that are each rank's own, by rank 0's document.

    Raises:
        CorruptStore: It is damaged.
    """
    found = []
    with _damage_named("rank 0"):
        stack: list[Slot] = [([_parsed(shared, "root")["root"]], 0, ROOT)]
        while stack:
            container, key, path = stack.pop()
            tag, _ = tag_of(container[key])
            if tag == "own":
                found.append(path.text())
            elif tag:
                stack.extend(reversed(slots(container[key], path)))
    return tuple(found)


def _read(shared: bytes, own: bytes | None, owner: int) -> WholeState:
    whole = _parsed(shared, "ranks", "root", "meshes", "tensors")
    mine = whole if own is None else _parsed(own)
    tensors = _shared_tensors(whole)
    first = len(tensors)
    tensors += [_own_tensor(row, owner) for row in sized(mine["own_tensors"])]
    for node in sized(mine["own"]):
        for place in chunk_places(node):
            if type(place["chunk"]) is not int or place["chunk"] < 0:
                raise CorruptStore(f"a rank's own values name tensor {place['chunk']!r:.40}")
            place["chunk"] += first
            if "tie" in place:
                place["tie"] = place["chunk"]
    holder: list[Any] = [whole["root"]]
    keys = []
    own_nodes: list[object] = list(mine["own"])
    met: list[object] = []
    stack: list[Slot] = [(holder, 0, ROOT)]
    while stack:
        container, key, path = stack.pop()
        tag, content = tag_of(container[key])
        if tag == "own":
            if type(content) is not int or content != len(met) or content >= len(own_nodes):
                raise CorruptStore(f"{path.shown()} is own value {content!r:.40} of rank {owner}, which does not fit")
            container[key] = own_nodes[content]
            met.append(own_nodes[content])
            keys.append(path.text())
        elif tag:
            stack.extend(reversed(slots(container[key], path)))
    if len(met) != len(own_nodes):
        raise CorruptStore(f"rank {owner} has {len(own_nodes)} own values, and the state places for {len(met)}")
    if b'"ref"' in shared or (own is not None and b'"ref"' in own):
        References(holder[0], own_nodes).make_absolute()
    document = json.dumps({"version": 1, "root": holder[0]}, separators=(",", ":")).encode("ascii")
    return WholeState(document, _table(tensors), tuple(tensors), tuple(keys), owner)


def _parsed(document: bytes, *names: str) -> dict[str, Any]:
    parsed = parse(document)
    if type(parsed) is not dict or type(parsed.get("version")) is not int:
        raise CorruptStore("the state document is no state of tierload")
    if parsed["version"] != 1:
        raise UnsupportedFormat(f"the state document has version {parsed['version']}; this release reads 1")
    missing = {*names, "own", "own_tensors"} - parsed.keys()
    if missing:
        raise CorruptStore(f"the state document of a commit by several ranks lacks {', '.join(sorted(missing))}")
    return parsed


def _shared_tensors(whole: dict[str, Any]) -> list[StoredTensor]:
    meshes = [_mesh(row) for row in sized(whole["meshes"])]
    return [_tensor(row, meshes, whole["ranks"]) for row in sized(whole["tensors"])]


def _mesh(row: object) -> Mesh:
    shape, ranks, names = sized(row, 3)
    if not _are_counts(shape) or not _are_counts(ranks) or prod(shape) != len(ranks) or len(set(ranks)) != len(ranks):
        raise CorruptStore(f"the state document has a damaged mesh: {row!r:.80}")
    return Mesh(tuple(shape), tuple(ranks), tuple(str(name) for name in sized(names)))


def _tensor(row: object, meshes: list[Mesh], ranks: object) -> StoredTensor:
    key, dtype, shape, parts, mesh, placements = sized(row, 6)
    damage = CorruptStore(f"the state document has a damaged tensor: {row!r:.120}")
    if type(key) is not str or not _are_counts(shape) or type(dtype) is not int or type(ranks) is not int:
        raise damage
    layout = None
    if mesh is not None:
        if type(mesh) is not int or not 0 <= mesh < len(meshes) or max(meshes[mesh].ranks, default=0) >= ranks:
            raise damage
        placed = tuple(_placement(one, len(shape)) for one in sized(placements))
        if len(placed) != len(meshes[mesh].shape):
            raise damage
        layout = Layout(meshes[mesh], placed)
    written = []
    for part in sized(parts):
        if len(sized(part)) != 3 or any(type(number) is not int for number in part) or min(part[0], part[2]) < 0:
            raise damage
        written.append((part[0], part[1], part[2]))
    return StoredTensor(key, dtype, tuple(shape), layout, tuple(written), _nbytes(shape, dtype))


def _placement(one: object, dims: int) -> Placement:
    if one is None or (type(one) is int and 0 <= one < dims):
        return one
    pair = sized(one, 2)
    if not _are_counts(pair) or pair[0] >= dims or pair[1] < 1:
        raise CorruptStore(f"the state document has a damaged placement: {one!r:.60}")
    return (pair[0], pair[1])


def _own_tensor(row: object, owner: int) -> StoredTensor:
    key, dtype, shape = sized(row, 3)
    if type(key) is not str or type(dtype) is not int or not _are_counts(shape):
        raise CorruptStore(f"the state document has a damaged tensor: {row!r:.120}")
    return StoredTensor(key, dtype, tuple(shape), None, ((0, -1, owner),), _nbytes(shape, dtype), owner)


def _nbytes(shape: Sequence[int], dtype: int) -> int:
    return prod(shape) * (BY_CODE[dtype].size if dtype in BY_CODE else 1)


def _are_counts(numbers: object) -> bool:
    return type(numbers) is list and all(type(n) is int and 0 <= n <= _INT64_MAX for n in numbers)


def _table(tensors: Sequence[StoredTensor]) -> ChunkTable:
    """The tensors as whole chunks, in their order."""
    keys = [tensor.key.encode("utf-8", "surrogatepass") for tensor in tensors]
    lengths = np.array([len(key) for key in keys], np.int64)
    ndims = np.array([len(tensor.shape) for tensor in tensors], np.int64)
    dims = [number for tensor in tensors for number in (*tensor.shape, *([0] * len(tensor.shape)), *tensor.shape)]
    nbytes = [tensor.nbytes for tensor in tensors]
    if max(nbytes, default=0) > _INT64_MAX:
        raise CorruptStore("the state document has a tensor of more bytes than there can be")
    return ChunkTable(
        keys=b"".join(keys),
        key_offsets=np.cumsum(lengths) - lengths,
        key_lengths=lengths,
        dtypes=np.array([min(max(tensor.dtype, 0), 255) for tensor in tensors], np.uint8),
        ndims=ndims.astype(np.uint8),
        dims_at=3 * (np.cumsum(ndims) - ndims),
        dims=np.array(dims, np.int64),
        nbytes=np.array(nbytes, np.int64),
    )
