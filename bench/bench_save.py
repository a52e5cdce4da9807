"""Saving a training state: on tmpfs against ``torch.save``, on this disk against what the two halves of it allow."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tierload
from bench.measuring import Figure, Result, Task, fsync_folder, interleave, median, tensors_of
from bench.versus import torch_save_durably
from tierload.engine import devices

_MEMORY_HOW = (
    "1 GiB of float32, weights and AdamW moments, saved in /dev/shm. Every element changes between two rounds. "
    "`torch.save` is synced, renamed, and its folder synced. No device is slower than encoding here: `auto` has to "
    "choose raw."
)
_CEILING_HOW = (
    "1 GiB of float32, weights and AdamW moments; every element changes between two rounds. A save can be as fast as "
    "the slower one of its two halves. `Writing alone` is as many bytes as the save stored, out of aligned memory into "
    "new files of 128 MiB with their size from the start, past the page cache (O_DIRECT), in blocks and at a depth as "
    "tierload has it for this device, and synced. `Encoding alone` is the same save with the same compression in "
    "/dev/shm: digests, encoding, and a copy of what is stored. All in turn, in one run."
)


def test_save_in_memory(benchmark, scale, memory, keep, adamw):
    result = Result("save-memory", "Save on tmpfs: 1 GiB, weights and AdamW moments", _MEMORY_HOW, memory)
    file, chosen = memory / "file", []
    with tierload.open(memory / "store", mode="w") as store:
        tasks = {
            "tierload.save": Task(
                lambda: chosen.append(store.save(adamw).compression), after=lambda: store.collect(keep=1)
            ),
            "torch.save": Task(lambda: torch_save_durably(adamw, file), after=file.unlink),
        }
        samples = interleave(benchmark, tasks, rounds=scale.of(9, 1), change=lambda: _scale(adamw))
        raw = store.head().raw_bytes
    assert set(chosen) == {"off"}
    result.add(Figure("saves by auto that chose to compress", len(chosen) - chosen.count("off"), "", limit=0))
    result.samples = samples
    for name in tasks:
        result.add(Figure.milliseconds(name, samples, name, note=f"{raw / 1e9 / median(samples[name]):.2f} GB/s"))
    result.add(Figure.against(samples, "tierload.save", "torch.save", asked=1.3))
    keep(result)


def test_save_against_the_ceiling(benchmark, scale, folder, memory, keep, adamw):
    result = Result("save-ceiling", "Save on this disk, of what its two halves allow", _CEILING_HOW, folder)
    way = devices.remembered(folder) or devices.calibrate(folder)
    store = tierload.open(folder / "store", mode="w")
    first = store.save(adamw)
    twin = tierload.open(memory / "store", mode="w", settings=tierload.Settings(compression=first.compression))
    writer = _Writer(folder / "plain", first.written_bytes, way)
    tasks = {
        "save": Task(lambda: store.save(adamw), after=lambda: store.collect(keep=1)),
        "write": Task(writer.write, after=writer.remove),
        "encode": Task(lambda: twin.save(adamw), after=lambda: twin.collect(keep=1)),
    }
    samples = interleave(benchmark, tasks, rounds=scale.of(7, 1), change=lambda: _scale(adamw))
    result.samples = samples
    stored = first.written_bytes / first.raw_bytes
    names = {
        "save": f"tierload.save ({first.compression}, {first.commit.io}, {stored:.3f} of the bytes stored)",
        "write": f"writing alone ({way.block_bytes >> 20} MiB a block, {way.depth} at a time)",
        "encode": "encoding alone",
    }
    for key, name in names.items():
        rate = first.raw_bytes / 1e9 / median(samples[key])
        result.add(Figure.milliseconds(name, samples, key, note=f"{rate:.2f} GB/s of the state's bytes"))
    pairs = zip(samples["write"], samples["encode"], strict=True)
    both = {"tierload.save": samples["save"], "the slower half": [max(pair) for pair in pairs]}
    result.add(Figure.against(both, "tierload.save", "the slower half", asked=0.7))
    store.close()
    twin.close()
    writer.close()
    keep(result)


def _scale(state: dict[str, object]) -> None:
    for tensor in tensors_of(state):
        tensor.mul_(1.0009765625)


class _Writer:
    """Random bytes into new files past the page cache, ``way.depth`` blocks at a time, until they are durable."""

    _FILE_BYTES = 128 << 20  # of a segment

    def __init__(self, folder: Path, nbytes: int, way: devices.Device) -> None:
        self._folder, self._nbytes, self._block = folder, nbytes // 4096 * 4096, way.block_bytes
        self._blocks = mmap.mmap(-1, 16 * way.block_bytes)  # of which each is aligned
        self._blocks.write(os.urandom(len(self._blocks)))
        self._threads = ThreadPoolExecutor(way.depth)
        folder.mkdir()

    def write(self) -> None:
        for start in range(0, self._nbytes, self._FILE_BYTES):
            size = min(self._FILE_BYTES, self._nbytes - start)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT
            descriptor = os.open(self._folder / str(start), flags)
            os.posix_fallocate(descriptor, 0, size)
            places = [(descriptor, at, min(at + self._block, size)) for at in range(0, size, self._block)]
            list(self._threads.map(lambda place: self._put(*place), places))
            os.fdatasync(descriptor)
            os.close(descriptor)
        fsync_folder(self._folder)

    def _put(self, descriptor: int, at: int, end: int) -> None:
        source = at % len(self._blocks)
        with memoryview(self._blocks) as blocks, blocks[source : source + end - at] as block:
            os.pwrite(descriptor, block, at)

    def remove(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()

    def close(self) -> None:
        self._threads.shutdown()
        self._blocks.close()
