"""What a rank has to save, in a form that ranks compare with few bytes: keys and shapes, and a digest of each value."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.engine.saving import page_set
from tierload.layout import plan_pages
from tierload.plan import is_in, replica
from tierload.state import CODE_NAMES, Cut, Unit, cut, matching, tag_of
from tierload.types import FlatState

__all__ = ["Description", "describe"]

DIGEST_BYTES = 16

Lines = dict[str, str]
"""Of each unit, by its key, what has to be the same on every rank: dtype, shape and layout of a tensor."""


@dataclass
class Description:
    """``digests`` has a row a unit: of what it says and of the bytes that are not spread over ranks, and of all units
    that it shares memory with: they are the same on all ranks, or none of them is. ``alone``: units that were declared
    to be each rank's own, and what shares memory with one. ``spread``: those with tensors that are spread over ranks.
    ``replicas`` maps a group of spread tensors and the part that this rank holds of them to a digest of that part: all
    ranks that hold the same part have to have the same."""

    cut: Cut
    flat: FlatState
    lines: Lines
    digests: npt.NDArray[np.uint8]
    replicas: dict[str, str]
    alone: npt.NDArray[np.bool_]
    spread: npt.NDArray[np.bool_]
    _held: dict[str, list[tuple[str, bytes]]]

    def matching(self, patterns: Sequence[str]) -> list[bool]:
        """Which units' keys match one of the patterns."""
        return matching(self.cut, patterns)

    def replica_digests(self) -> list[tuple[str, str, str]]:
        """Group, key and digest of each part of a spread tensor that other ranks hold too."""
        return [(label, key, digest.hex()) for label, held in self._held.items() for key, digest in held]

    @cached_property
    def outline(self) -> str:
        """Equal where keys, shapes, dtypes and layouts of two ranks are."""
        frame = json.dumps(self.cut.frame, separators=(",", ":"))
        return _hex(frame.encode(), json.dumps(self.lines).encode())

    def packed_lines(self) -> bytes:
        """For a rank whose outline is another one."""
        return zlib.compress(json.dumps(self.lines).encode(), 1)

    def differences(self, packed: bytes, rank: int) -> list[str]:
        """Where this rank's keys, shapes, dtypes or layouts are not those of rank 0."""
        others: Lines = json.loads(zlib.decompress(packed))
        found = [f"rank {rank} lacks {key!r}, which rank 0 has" for key in others if key not in self.lines]
        found += [f"rank {rank} has {key!r}, which rank 0 lacks" for key in self.lines if key not in others]
        found += [
            f"{key!r} is {line} on rank {rank}, and {others[key]} on rank 0"
            for key, line in self.lines.items()
            if others.get(key, line) != line
        ]
        return found or [f"the containers of rank {rank}'s state are of other kinds than rank 0's"]

    def unequal(self, reference: bytes) -> npt.NDArray[np.bool_]:
        """Which units have other values than rank 0's, whose digests these are."""
        theirs = np.frombuffer(reference, np.uint8).reshape(-1, DIGEST_BYTES)
        different: npt.NDArray[np.bool_] = (theirs != self.digests).any(axis=1)
        return different


def describe(flat: FlatState, per_rank: Sequence[str], rank: int, page_bytes: int, threads: int) -> Description:
    """Cuts a state into units and digests what other ranks may have too. The bytes must not change any more."""
    whole = cut(flat, per_rank)
    spread = {chunk for unit in whole.units if not unit.alone for chunk in unit.chunks if chunk in flat.sharded}
    layouts = {chunk: flat.sharded[chunk].layout for chunk in spread}
    copied = {chunk for chunk, layout in layouts.items() if is_in(layout.mesh, rank) and replica(layout, rank)[1] > 1}
    plain = {chunk for unit in whole.units if not unit.alone for chunk in unit.chunks} - spread
    bytes_of = _chunk_digests(flat, sorted(plain | copied), page_bytes, threads)
    digests = np.zeros((len(whole.units), DIGEST_BYTES), np.uint8)
    lines: Lines = {}
    for number, unit in enumerate(whole.units):
        lines[unit.key if unit.key not in lines else f"{unit.key} ({number})"] = _line(unit, flat)
        if unit.alone:
            continue
        texts = [unit.text().encode()]
        for chunk in unit.chunks:
            if chunk not in spread:
                info = flat.chunks.info(chunk)
                texts += [f"{info.key}:{info.dtype}:{info.shape}".encode(), bytes_of[chunk]]
        digests[number] = np.frombuffer(_digest(*texts), np.uint8)
    alone = np.array([unit.alone for unit in whole.units], np.bool_)
    for group in _tied(whole.units):
        alone[group] = alone[group].any()
        digests[group] = np.frombuffer(_digest(np.array(group, "<u4").tobytes(), digests[group].tobytes()), np.uint8)
    of_ranks = np.array([not (unit.alone or spread.isdisjoint(unit.chunks)) for unit in whole.units], np.bool_)
    held = _held(flat, {chunk: bytes_of[chunk] for chunk in sorted(copied)}, rank)
    replicas = {label: _hex(*(digest for _, digest in group)) for label, group in held.items()}
    return Description(whole, flat, lines, digests, replicas, alone, of_ranks, held)


def _tied(units: Sequence[Unit]) -> list[list[int]]:
    """The numbers of units that share memory, where several do."""
    groups = [[number] for number in range(len(units))]
    first: dict[int, int] = {}
    for number, unit in enumerate(units):
        for chunk in unit.chunks:
            group, other = groups[first.setdefault(chunk, number)], groups[number]
            if group is not other:
                group += other
                for member in other:
                    groups[member] = group
    return [sorted(group) for number, group in enumerate(groups) if len(group) > 1 and group[0] == number]


def _line(unit: Unit, flat: FlatState) -> str:
    if unit.alone or unit.is_values:
        return "a value"
    tag, content = tag_of(unit.node)
    shape = f" and shape {tuple(content['shape'])}" if "shape" in content else ""
    if flat.sharded.keys().isdisjoint(unit.chunks):
        # How it lies in memory, and how many parts a sparse one has, is its value: each rank may have its own.
        dtype = content.get("dtype") or CODE_NAMES[flat.chunks.info(unit.chunks[0]).dtype]
        return f"a tensor of dtype {dtype}{shape}" if tag == "t" else f"a tensor of form {content['form']}{shape}"
    told = []
    names = [name for name in content if name not in ("chunk", "shape", "parts")]
    marks = "".join(f", {name} {content[name]}" for name in names if name != "tie")
    for chunk in unit.chunks:
        info, spread = flat.chunks.info(chunk), flat.sharded.get(chunk)
        if spread is not None:
            mesh = spread.layout.mesh
            told.append(
                f"a tensor of dtype {CODE_NAMES[info.dtype]} and shape {spread.shape}, placed "
                f"{spread.layout.placements} on a mesh {mesh.shape} of ranks {_shown(mesh.ranks)}{marks}"
            )
        if info.key != unit.key:
            told.append(f"in the memory of {info.key!r}")
    return ", ".join(told)


def _shown(ranks: Sequence[int]) -> str:
    """Ranks in short: a mesh may have thousands."""
    if len(ranks) <= 16:
        return str(list(ranks))
    return f"{ranks[0]} to {ranks[-1]} ({_hex(json.dumps(list(ranks)).encode())[:8]})"


def _held(flat: FlatState, copied: dict[int, bytes], rank: int) -> dict[str, list[tuple[str, bytes]]]:
    """Key and digest of the parts that several ranks hold, for each part of a mesh."""
    groups: dict[str, list[tuple[str, bytes]]] = {}
    for chunk, digest in copied.items():
        mesh, placements = flat.sharded[chunk].layout.mesh, flat.sharded[chunk].layout.placements
        place = _place(mesh.ranks.index(rank), mesh.shape)
        part = [at for at, one in zip(place, placements, strict=True) if one is not None]
        label = _hex(repr((mesh.shape, mesh.ranks, placements, part)).encode())
        groups.setdefault(label, []).append((flat.chunks.key(chunk), digest))
    return groups


def _place(number: int, shape: Sequence[int]) -> list[int]:
    """The coordinates of the n-th place of a grid, in row-major order."""
    place = []
    for count in reversed(shape):
        number, at = divmod(number, count)
        place.append(at)
    return place[::-1]


def _chunk_digests(flat: FlatState, chunks: Sequence[int], page_bytes: int, threads: int) -> dict[int, bytes]:
    """What identifies the bytes of each of these chunks."""
    plan = plan_pages(flat, page_bytes, 0)
    rows = plan.rows[list(chunks)]
    counts = rows["pages"].astype(np.int64)
    ends = np.cumsum(counts)
    numbers = np.arange(counts.sum()) + np.repeat(rows["first_page"].astype(np.int64) - (ends - counts), counts)
    pages = _native.page_digests(page_set(plan.some(numbers)), threads)
    return {
        chunk: _digest(pages[end - count : end].tobytes())
        for chunk, end, count in zip(chunks, ends.tolist(), counts.tolist(), strict=True)
    }


def _digest(*parts: bytes) -> bytes:
    one = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        one.update(len(part).to_bytes(8, "little"))
        one.update(part)
    return one.digest()


def _hex(*parts: bytes) -> str:
    return _digest(*parts).hex()
