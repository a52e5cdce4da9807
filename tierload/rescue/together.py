"""A commit by several ranks as if it were one rank's: tensors put together from the pieces in all shards."""

import functools
import math
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np

from .catalog import Commit
from .document import Own, parse
from .manifest import SIZES, Manifest, Tensor, read_root
from .meshes import Box, spread_boxes
from .report import Damage, Report

Whole = namedtuple("Whole", ["key", "stored", "dtype", "shape", "pieces"])  # of a tensor: key, and as chunks have it


def _whole(row: list[Any], meshes: list[Any]) -> Whole:
    key, dtype, shape, parts, mesh, placements = row
    boxes: list[tuple[int, Box]] = []
    if 0 in shape:
        pass  # no bytes, no pieces
    elif mesh is not None:
        boxes += spread_boxes(shape, meshes[mesh], placements, parts[0][2])
    else:
        rest = (0,) * (len(shape) - 1), tuple(shape[1:])
        for begin, end, rank in parts:
            all_rows = (0,) * len(shape), tuple(shape)
            boxes.append((rank, all_rows if end < 0 else ((begin, *rest[0]), (end - begin, *rest[1]))))
    return Whole(key, key, dtype, shape, boxes)


def _own(rank: int, key: str, dtype: int, shape: list[int]) -> Whole:
    pieces = [] if 0 in shape else [(rank, ((0,) * len(shape), tuple(shape)))]
    return Whole(f"~own/{rank}/{key}", key, dtype, shape, pieces)


class Together:
    """What `Manifest` is for a commit by one rank. Tensors that a rank has of its own have keys below `~own/<rank>/`,
    which no other key begins with. Shards other than rank 0's may be damaged: `lost` says so."""

    def __init__(self, store: Path, commit: Commit, report: Report) -> None:
        self.store, self.report, self.lost = store, report, list[str]()
        self.shards: list[Manifest | None] = []
        for rank, row in enumerate(read_root(store, commit, report)):
            try:
                self.shards.append(Manifest(store, row, report, commit.ranks))
            except ValueError as damage:
                if rank == 0:
                    raise
                self.lost.append(f"rank {rank}: {damage}")
                self.shards.append(None)
        first = self.shards[0]
        assert first is not None
        self.state = first.state
        documents = [parse(shard.state) if shard else {"own": [], "own_tensors": []} for shard in self.shards]
        try:
            self.tensors = [_whole(row, documents[0]["meshes"]) for row in documents[0]["tensors"]]
            self.own = list[Own]()
            for rank, document in enumerate(documents):
                rows = document["own_tensors"]
                self.own.append((document["own"], len(self.tensors), len(rows)))
                self.tensors += [_own(rank, *row) for row in rows]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Damage(f"the state document is not readable: {type(error).__name__} {error}") from None
        self.chunks = len(self.tensors)
        self.budget = sum(shard.budget for shard in self.shards if shard)
        self.numbers = functools.cache(self._numbers)

    def texts(self) -> dict[str, str]:
        """What is no tensor, as it is stored: the document of all, and those of the own values of ranks from 1 on."""
        texts = {f"state.{rank}": shard.state for rank, shard in enumerate(self.shards) if shard}
        texts["state"] = texts.pop("state.0")
        return {name: text.decode("ascii", "backslashreplace") for name, text in texts.items()}

    def missing(self) -> list[str]:
        """What is damaged or not there."""
        return [*self.lost, *(line for shard in self.shards if shard for line in shard.missing())]

    def key(self, number: int) -> str:
        """The key of a tensor."""
        key: str = self.tensors[number].key
        return key

    def charge(self, size: int) -> None:
        """As of `Manifest`."""
        if size > self.budget:
            raise Damage("the tensors together are far larger than what is stored")
        self.budget -= size

    def _numbers(self, rank: int) -> dict[tuple[str, tuple[int, ...]], int]:
        """The chunks of a shard by key and offsets."""
        shard = self.shards[rank] if 0 <= rank < len(self.shards) else None
        if shard is None:
            raise Damage(f"the shard of rank {rank}, which has a part of it, is damaged")
        return {shard.box(number)[:2]: number for number in range(shard.chunks)}

    def chunk(self, number: int) -> Tensor:
        """A tensor: dtype, shape and bytes, put together from its pieces."""
        _, key, code, shape, pieces = self.tensors[number]
        dtype, size = [("", 0), *SIZES.items()][code if 0 < code <= len(SIZES) else 0]
        if not size or any(type(extent) is not int or extent < 0 for extent in shape):
            raise Damage(f"shape {shape}, dtype {code}")
        self.charge((size + 1) * math.prod(shape))
        whole, there = np.zeros(shape, f"V{size}"), np.zeros(shape, bool)
        for rank, (offsets, sizes) in pieces:
            if (found := self.numbers(rank).get((key, offsets))) is None:
                raise Damage(f"the shard of rank {rank} has no part of it at {list(offsets)}")
            shard = self.shards[rank]
            assert shard is not None
            *about, data = shard.chunk(found)
            if about != [dtype, sizes] or shard.box(found)[2] != tuple(shape):
                raise Damage(f"the part at {list(offsets)} of rank {rank} is {about}, not {dtype}{list(sizes)}")
            where = tuple(slice(at, at + count) for at, count in zip(offsets, sizes, strict=True))
            if there[where].shape != sizes or there[where].any():
                raise Damage(f"the part at {list(offsets)} of rank {rank} overlaps another, or goes beyond {shape}")
            there[where], whole[where] = True, np.frombuffer(data, f"V{size}").reshape(sizes)
        if not there.all():
            raise Damage("its parts do not make up all of it")
        return dtype, tuple(shape), whole.tobytes()
