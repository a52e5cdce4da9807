"""A store in memory: what the engine does between flatten and finish, byte for byte."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np

from tierload.state import flatten, plan_bind, plan_load
from tierload.types import ChunkInfo, ChunkSource, FlatState


@dataclass
class Saved:
    """The bytes of a state, as a store would hold them."""

    document: bytes
    infos: list[ChunkInfo]
    data: list[bytes]
    notes: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        return [info.key for info in self.infos]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.data))


def content(source: ChunkSource) -> bytes:
    if not source.nbytes:
        return b""
    if not source.strides:
        return ctypes.string_at(source.pointer, source.nbytes)
    size = source.nbytes // math.prod(source.sizes)
    reach = sum((count - 1) * step for count, step in zip(source.sizes, source.strides, strict=True)) + size
    memory = np.frombuffer((ctypes.c_char * reach).from_address(source.pointer), np.dtype((np.void, size)), 1)
    return np.lib.stride_tricks.as_strided(memory, source.sizes, source.strides).tobytes()


def stored(flat: FlatState) -> Saved:
    keys = [source.key.encode("utf-8", "surrogatepass") for source in flat.chunks]
    assert keys == sorted(set(keys)), "chunks are sorted by key and keys are unique"
    infos, data = [], []
    for number, source in enumerate(flat.chunks):
        infos.append(
            ChunkInfo(number, source.key, source.dtype, source.shape, source.offsets, source.sizes, source.nbytes)
        )
        data.append(content(source))
    return Saved(flat.document, infos, data, flat.notes)


def save(state, **options) -> Saved:
    return stored(flatten(state, **options))


def run(plan, saved: Saved):
    chunks = [spot.chunk for spot in plan.destinations]
    assert len(chunks) == len(set(chunks)), "a chunk has one destination"
    for spot in plan.destinations:
        assert spot.nbytes == saved.infos[spot.chunk].nbytes
        assert plan.keys_of(spot.chunk), "every chunk that is read feeds a key"
        ctypes.memmove(spot.pointer, saved.data[spot.chunk], spot.nbytes)
    return plan.finish()


def load(saved: Saved, **options):
    return run(plan_load(saved.document, saved.infos, **options), saved)


def bind(saved: Saved, into, **options):
    return run(plan_bind(saved.document, saved.infos, into, **options), saved)


def round_trip(state, **options):
    return load(save(state), **options)
