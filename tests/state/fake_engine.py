"""A store in memory: what the engine does between flatten and finish, byte for byte."""

from __future__ import annotations

import ctypes
import math
import types
from dataclasses import dataclass

import numpy as np
import torch

from tierload.state import flatten, plan_bind, plan_load
from tierload.types import ChunkInfo, ChunkTable, FlatState


def table(infos: list[ChunkInfo]) -> ChunkTable:
    """Chunks as columns."""
    keys = [info.key.encode("utf-8", "surrogatepass") for info in infos]
    dims = [[*info.shape, *info.offsets, *info.sizes] for info in infos]
    ends = np.cumsum([0, *map(len, keys)])
    return ChunkTable(
        b"".join(keys),
        ends[:-1],
        np.diff(ends),
        np.array([info.dtype for info in infos], np.uint8),
        np.array([len(info.shape) for info in infos], np.uint8),
        np.cumsum([0, *map(len, dims)])[:-1],
        np.array([number for each in dims for number in each], np.int64),
        np.array([info.nbytes for info in infos], np.int64),
    )


@dataclass
class Saved:
    """The bytes of a state, as a store would hold them."""

    document: bytes
    chunks: ChunkTable
    data: list[bytes]
    notes: tuple[str, ...]

    @property
    def infos(self) -> list[ChunkInfo]:
        return self.chunks.infos()

    @property
    def keys(self) -> list[str]:
        return [info.key for info in self.infos]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.data))


def on_cuda(device: int, pointer: int, nbytes: int) -> torch.Tensor | None:
    """The bytes in memory of a CUDA device; None for other memory, which is the processor's, also that of fakes."""
    if not 0 < device < 128:
        return None

    facts = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    memory = types.SimpleNamespace(__cuda_array_interface__=facts)
    return torch.as_tensor(memory, device=torch.device("cuda", device - 1))


def content(flat: FlatState, info: ChunkInfo) -> bytes:
    pointer, device = int(flat.pointers[info.number]), int(flat.devices[info.number])
    if not info.nbytes:
        return b""
    strides = flat.strides.get(info.number)
    assert strides is None or not device, "what lies apart is in the processor's memory"
    there = on_cuda(device, pointer, info.nbytes)
    if there is not None:
        return there.cpu().numpy().tobytes()
    if strides is None:
        return ctypes.string_at(pointer, info.nbytes)
    size = info.nbytes // math.prod(info.sizes)
    reach = sum((count - 1) * step for count, step in zip(info.sizes, strides, strict=True)) + size
    memory = np.frombuffer((ctypes.c_char * reach).from_address(pointer), np.dtype((np.void, size)), 1)
    return np.lib.stride_tricks.as_strided(memory, info.sizes, strides).tobytes()


def stored(flat: FlatState) -> Saved:
    infos = flat.chunks.infos()
    keys = [info.key.encode("utf-8", "surrogatepass") for info in infos]
    assert keys == sorted(set(keys)), "chunks are sorted by key and keys are unique"
    return Saved(flat.document, flat.chunks, [content(flat, info) for info in infos], flat.notes)


def save(state, **options) -> Saved:
    return stored(flatten(state, **options))


def run(plan, saved: Saved):
    spots = plan.destinations
    assert len(spots) == len(set(spots.chunks.tolist())), "a chunk has one destination"
    columns = (spots.chunks.tolist(), spots.pointers.tolist(), spots.devices.tolist())
    for chunk, pointer, device in zip(*columns, strict=True):
        assert plan.keys_of(chunk), "every chunk that is read feeds a key"
        data = saved.data[chunk]
        there = on_cuda(device, pointer, len(data))
        if there is None:
            ctypes.memmove(pointer, data, len(data))
        else:
            there.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return plan.finish()


def load(saved: Saved, **options):
    return run(plan_load(saved.document, saved.chunks, **options), saved)


def bind(saved: Saved, into, **options):
    return run(plan_bind(saved.document, saved.chunks, into, **options), saved)


def round_trip(state, **options):
    return load(save(state), **options)
