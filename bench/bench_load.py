"""Loading a training state: cold from the disk against ``torch.load``, warm from memory against a plain read."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import tierload
from bench.hardware import cores
from bench.measuring import CPU, Figure, Result, Samples, Task, drop_cached, interleave, median, tensors_of
from bench.versus import torch_save_durably

_COLD_HOW = (
    "1 GiB of float32 in plain dicts: 32 weights and their AdamW moments. Before each load the files were taken out of "
    "the page cache (posix_fadvise DONTNEED after an fsync), and free memory was given back to the system "
    "(malloc_trim). No load comes right after itself: in this virtual machine `torch.load` is faster when many pages "
    "have just been freed. *Into*: the memory of a state that is there already. *Fast* and *off* say how the state was "
    "compressed when it was saved: auto takes one of them, by what it finds the device and the processor to be. "
    "`torch.load` is `weights_only=True, mmap=False`, and gives new memory. tierload verifies two digests of every "
    "page; torch verifies nothing. `plain read` is torch's file into touched memory past the page cache (O_DIRECT), 8 "
    "reads of 1 MiB at a time: what this disk gives."
)
_WARM_HOW = (
    "The same state, saved with compression off in /dev/shm, loaded into the memory of a state that is there already. "
    "`plain read`: the same segment files by as many threads, a tensor a call, into the same memory, not verified."
)


def test_cold_load(benchmark, scale, folder, keep, adamw):
    result = Result("load-cold", "Cold load: 1 GiB, weights and AdamW moments", _COLD_HOW, folder)
    file = folder / "file.pt"
    torch_save_durably(adamw, file)
    room = _room_for(file.stat().st_size)
    with ThreadPoolExecutor(8) as threads:
        tasks = {
            # First, since the first one runs twice in a row.
            "plain read": Task(lambda: _read([file], room, threads, os.O_DIRECT), before=partial(_forget, file)),
            "torch.load": _fresh(partial(torch.load, file, weights_only=True, mmap=False), file),
        }
        for compression in ("fast", "off"):
            store = folder / compression
            report = tierload.save(adamw, store, settings=tierload.Settings(compression=compression))
            tasks[f"tierload.load into ({compression})"] = Task(
                partial(tierload.load, store, into=adamw), before=partial(_forget, store)
            )
            tasks[f"tierload.load ({compression})"] = _fresh(partial(tierload.load, store), store)
        samples = interleave(benchmark, tasks, rounds=scale.of(11, 1))
    _times(result, samples, report.raw_bytes)
    for compression in ("fast", "off"):
        result.add(Figure.against(samples, f"tierload.load into ({compression})", "torch.load", asked=1.5))
        result.add(Figure.against(samples, f"tierload.load ({compression})", "torch.load", asked=1.1))
    loaded, expected = tierload.load(folder / "fast"), torch.load(file, weights_only=True)
    assert all(map(torch.equal, tensors_of(loaded), tensors_of(expected)))
    keep(result)


def test_warm_raw_load(benchmark, scale, memory, keep, adamw):
    result = Result("load-warm", "Warm load of raw pages from tmpfs: 1 GiB", _WARM_HOW, memory)
    path = memory / "store"
    report = tierload.save(adamw, path, settings=tierload.Settings(compression="off"))
    segments = sorted((path / "seg").iterdir())
    tensors = tensors_of(adamw)
    before = [tensor.clone() for tensor in tensors]
    store = tierload.open(path)
    with ThreadPoolExecutor(cores()) as threads:
        tasks = {
            "Store.load into": Task(lambda: store.load(into=adamw)),
            "plain read": Task(lambda: _read(segments, [_view(tensor) for tensor in tensors], threads)),
        }
        samples = interleave(benchmark, tasks, rounds=scale.of(15, 1))
        store.load(into=adamw)
    _times(result, samples, report.raw_bytes)
    result.add(Figure.against(samples, "Store.load into", "plain read", asked=0.75))
    assert all(map(torch.equal, tensors, before))
    store.close()
    keep(result)


def _fresh(load: Callable[[], object], path: Path) -> Task:
    """A load into memory that the process has not had before; what it gave is let go outside of the measured time."""
    loaded: list[object] = []
    return Task(lambda: loaded.append(load()), before=partial(_forget, path), after=loaded.clear)


def _forget(path: Path) -> None:
    """Neither the page cache has the files, nor this process memory that is free and touched already."""
    drop_cached(path)
    ctypes.CDLL(None).malloc_trim(0)


def _times(result: Result, samples: Samples, nbytes: int) -> None:
    result.samples = samples
    for name in (name for name in samples if not name.endswith(CPU)):
        note = f"{nbytes / 1e9 / median(samples[name]):.2f} GB/s"
        result.add(Figure.milliseconds(name, samples, name, note=note))


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def _room_for(nbytes: int) -> list[memoryview]:
    """Memory that O_DIRECT takes, touched, in pieces of 1 MiB."""
    whole = torch.zeros(nbytes // 4 + 2048, dtype=torch.int32)
    skipped = -whole.data_ptr() % 4096
    aligned = _view(whole)[skipped : skipped + -(-nbytes // 4096) * 4096]
    return [aligned[at : at + (1 << 20)] for at in range(0, len(aligned), 1 << 20)]


def _read(files: list[Path], room: list[memoryview], threads: ThreadPoolExecutor, flags: int = 0) -> None:
    """Reads the files, one after the other, into the pieces of memory, one after the other: a call a piece, or what of
    it a file still fills."""
    left = room[::-1]
    calls = []
    descriptors = []
    for file in files:
        descriptors.append(os.open(file, os.O_RDONLY | flags))
        size, at = file.stat().st_size, 0
        while at < size and left:
            piece = left.pop()
            if not flags and len(piece) > size - at:
                left.append(piece[size - at :])
                piece = piece[: size - at]
            calls.append((descriptors[-1], [piece], at))
            at += len(piece)
    list(threads.map(lambda call: os.preadv(*call), calls))
    for descriptor in descriptors:
        os.close(descriptor)
