"""Saving a state of which everything has changed, and loading it, against torch.save and torch.load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tierload
from bench.measuring import Figure, Result, Samples, Task, drop_cached, fsync_folder, interleave, ratios
from bench.versus import torch_save_durably

_SAVE_HOW = (
    "Every element changes between two rounds. `torch.save` writes a new file, is synced, renamed, and its folder "
    "synced; safetensors is synced in the same way; `plain write` is the tensors' memory into a new file, synced: what "
    "this disk gives. tierload's data goes past the page cache where it does not say otherwise. What the round before "
    "wrote is removed (of the stores: collected), outside of the measured time."
)
_LOAD_HOW = (
    "Into new memory. tierload verifies two digests of every page; torch and safetensors verify nothing. Warm: the "
    "file was read just before. Cold: it was taken out of the page cache (posix_fadvise DONTNEED after an fsync)."
)


@pytest.fixture(params=["large", "trained"])
def subject(request, scale):
    """(name, title, the state for tierload, the state for torch, what changes all of it)."""
    if request.param == "trained":
        run = request.getfixturevalue("trained")
        return "trained", "the demonstration's state, trained", run.state, run.plain, run.step
    state = request.getfixturevalue("large")

    def change() -> None:
        for tensor in state.values():
            tensor.mul_(1.0009765625)

    return "large", "1 GiB of normally distributed float32 numbers", state, lambda: state, change


def test_save(benchmark, scale, folder, keep, subject):
    name, title, state, plain, change = subject
    result = Result(f"save-{name}", f"Durable save: {title}", _SAVE_HOW, folder)
    stores = {
        "tierload.save": tierload.open(folder / "auto", mode="w"),
        "tierload.save, through the page cache": tierload.open(
            folder / "buffered", mode="w", settings=tierload.Settings(io="buffered")
        ),
        "tierload.save, compression off": tierload.open(
            folder / "off", mode="w", settings=tierload.Settings(compression="off")
        ),
    }
    tasks = {
        text: Task(lambda s=store: s.save(state), after=lambda s=store: s.collect(keep=1))
        for text, store in stores.items()
    }
    file = folder / "file"
    tasks["torch.save"] = Task(lambda: torch_save_durably(plain(), file), after=file.unlink)
    if name == "large":
        tasks["safetensors"] = Task(lambda: _save_safetensors(state, file), after=file.unlink)
        tasks["plain write"] = Task(lambda: _plain_write(state, file), after=file.unlink)
    samples = interleave(benchmark, tasks, rounds=scale.of(7, 1), change=change)
    nbytes = stores["tierload.save"].head().raw_bytes
    _report(result, samples, list(tasks), nbytes, "torch.save")
    for text, store in stores.items():
        result.add(Figure(f"bytes written ÷ raw, {text}", store.head().written_bytes / nbytes, ""))
        store.close()
    keep(result)


def test_load(benchmark, scale, folder, keep, subject):
    name, title, state, plain, _ = subject
    result = Result(f"load-{name}", f"Load: {title}", _LOAD_HOW, folder)
    store, file, other = folder / "store", folder / "file.pt", folder / "file.safetensors"
    raw = tierload.save(state, store).raw_bytes
    torch_save_durably(plain(), file)
    readers = {"tierload.load": (store, lambda: tierload.load(store)), "torch.load": (file, lambda: torch.load(file))}
    if name == "large":
        _save_safetensors(state, other)
        readers["safetensors"] = (other, lambda: load_file(other))
    tasks = {}
    for text, (path, read) in readers.items():
        tasks[f"{text}, warm"] = Task(read, before=lambda p=path: _read_all(p))
        tasks[f"{text}, cold"] = Task(read, before=lambda p=path: drop_cached(p))
    samples = interleave(benchmark, tasks, rounds=scale.of(7, 1))
    for when in ("warm", "cold"):
        names = [task for task in tasks if task.endswith(when)]
        _report(result, samples, names, raw, f"torch.load, {when}")
    loaded, expected = tierload.load(store), torch.load(file)
    if name == "large":
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    keep(result)


def _report(result: Result, samples: Samples, names: list[str], nbytes: int, rival: str) -> None:
    result.samples |= samples
    for name in names:
        note = f"{nbytes / 1e9 / sorted(samples[name])[len(samples[name]) // 2]:.2f} GB/s"
        result.add(Figure.milliseconds(name, samples, name, note=note))
    result.add(Figure.of(f"{names[0]} ÷ {rival}", ratios(samples[names[0]], samples[rival]), ""))


def _save_safetensors(state: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    save_file(state, temporary)
    descriptor = os.open(temporary, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    temporary.rename(path)
    fsync_folder(path.parent)


def _plain_write(state: dict[str, torch.Tensor], path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            file.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(file.fileno())
    fsync_folder(path.parent)


def _read_all(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.read_bytes()
