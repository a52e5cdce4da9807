"""Loads of a training state to an accelerator, cold and warm, beside others and beside what the disk, the page cache
and PCIe give in the same run; and a forward pass that begins before everything is there. At toy size all of it is on
the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import tierload
from bench.accelerator import Peaks, device_for, direct_rates, host_to_device, page_cache, synchronize
from bench.conftest import Scale
from bench.gpu_peers import safetensors_durably
from bench.llama import AdamW, Llama, Training, nbytes_of
from bench.measuring import Figure, Result, Task, drop_cached, median, ratios, take_turns
from bench.versus import torch_save_durably

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_HOW = (
    "A training state in the shape of a Llama, 6 GiB on the device: bfloat16 weights, float32 moments of AdamW. "
    "tierload loads into the state that is there, verified, from what was saved raw (`off`) and by `auto`; DCP into it "
    "too; safetensors (`load_file`) and `torch.load` (`mmap=True`) give new tensors on the device, and none of these "
    "verifies. In turn, in one process, each round in the other order. "
)
_COLD_HOW = _HOW + (
    "Before each load its files were taken out of the page cache (posix_fadvise DONTNEED after an fsync). `ceiling` is "
    "the rate of reads past the page cache in the same round, times what compression saved."
)
_WARM_HOW = _HOW + (
    "Before each load all of its files were read. `ceiling` is the slower one of the page cache, read by 8 or 16 "
    "threads into pinned memory, whichever is faster, and of copies from pinned memory to the device."
)
_HOT_HOW = (
    "The same state, cold. A model and an optimizer on the device; *load* is all of `tierload.load`, *hot start* until "
    "the output of a first forward pass of a few tokens is there, which needs the weights alone. `needed` is their "
    "share of all bytes. In turn."
)
_KINDS = ("off", "auto")


class _Files:
    """One state as everybody keeps it, and how each loads it."""

    def __init__(self, scale: Scale, folder: Path) -> None:
        self.device = device_for(scale)
        self.run = Training.of(scale.of(6 << 30, 1 << 20), self.device, batch=1, context=16)
        self.nbytes = nbytes_of(self.run.plain())
        self.saved = {name: tensor.clone() for name, tensor in self.run.named_tensors().items()}
        self.folder = folder
        direct_rates(folder, scale)  # what `auto` goes by
        self.stored = {}
        for kind in _KINDS:
            settings = tierload.Settings(compression=kind)
            report = tierload.save(self.run.state, folder / kind, settings=settings)
            self.stored[kind] = report.written_bytes / report.raw_bytes
        torch_save_durably(self.run.plain(), folder / "torch")
        safetensors_durably(self.run, folder / "safetensors")
        dcp.save(self.run.plain(), storage_writer=dcp.FileSystemWriter(folder / "dcp", thread_count=8))

    def loads(self) -> dict[str, tuple[Path, Callable[[], object]]]:
        def with_torch() -> object:
            return torch.load(self.folder / "torch", map_location=self.device, mmap=True, weights_only=True)

        names: dict[str, tuple[Path, Callable[[], object]]] = {
            f"tierload ({kind})": (self.folder / kind, partial(tierload.load, self.folder / kind, into=self.run.state))
            for kind in _KINDS
        }
        return names | {
            "safetensors": (
                self.folder / "safetensors",
                lambda: load_file(self.folder / "safetensors", device=self.device),
            ),
            "torch.load": (self.folder / "torch", with_torch),
            "DCP": (self.folder / "dcp", lambda: dcp.load(self.run.plain(), checkpoint_id=self.folder / "dcp")),
        }

    def tasks(self, before: Callable[[Path], object]) -> dict[str, Task]:
        def task(path: Path, load: Callable[[], object]) -> Task:
            loaded: list[object] = []

            def timed() -> None:
                loaded.append(load())
                synchronize(self.device)

            return Task(timed, before=lambda: before(path), after=loaded.clear)

        return {name: task(*way) for name, way in self.loads().items()}

    def spoil(self) -> None:
        """So that what is there afterwards was loaded."""
        with torch.no_grad():
            for tensor in self.run.named_tensors().values():
                tensor.zero_()

    def assert_loaded(self) -> None:
        assert all(torch.equal(tensor, self.saved[name]) for name, tensor in self.run.named_tensors().items())

    def add_peaks(self, result: Result, before: Callable[[Path], object]) -> None:
        """Of each of tierload's loads, which is also looked at."""
        for kind in _KINDS:
            self.spoil()
            before(self.folder / kind)
            with Peaks(self.device) as peaks:
                tierload.load(self.folder / kind, into=self.run.state)
            self.assert_loaded()
            result.add(Figure(f"host memory ({kind})", peaks.host / 2**30, "GiB", limit=1))
            result.add(Figure(f"memory of the device ({kind})", peaks.device / 2**20, "MiB", limit=512))


@pytest.fixture(scope="module")
def files(scale, tmp_path_factory):
    """Written once: others take their time."""
    path = tmp_path_factory.mktemp("gpu-load")
    yield _Files(scale, path)
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def _read(path: Path) -> None:
    """Into the page cache."""
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    page_cache(found, 8, pinned=False)()


def _add_rates(result: Result, files: _Files, ceilings: dict[str, list[float]], *, ceiling_share: float) -> None:
    """Each load's time and rate; of tierload's also what the ceiling is of it."""
    for name in files.loads():
        seconds = result.samples[name]
        note = f"{files.nbytes / 1e9 / median(seconds):.2f} GB/s"
        result.add(Figure.milliseconds(name, result.samples, name, note=note))
    for kind, rates in ceilings.items():
        rate = [files.nbytes / seconds for seconds in result.samples[f"tierload ({kind})"]]
        what = f"ceiling ÷ rate ({kind}, {files.stored[kind]:.3f} of the bytes stored)"
        result.add(Figure.of(what, ratios(rates, rate), "", limit=1 / ceiling_share))
    for name in ("safetensors", "torch.load", "DCP"):
        for kind in _KINDS:
            result.add(Figure.against(result.samples, f"tierload ({kind})", name))


def test_cold(benchmark, scale, files, keep):
    result = Result("gpu-load-cold", "Cold load to an accelerator: 6 GiB", _COLD_HOW, files.folder)
    reads: list[float] = []
    files.spoil()
    result.samples = take_turns(
        files.tasks(drop_cached),
        rounds=scale.of(2, 1),
        change=lambda: reads.append(direct_rates(files.folder, scale)[1]),
    )
    reads = reads[1:]  # as the rounds
    benchmark.pedantic(lambda: None, rounds=1)
    ceilings = {kind: [rate / files.stored[kind] for rate in reads] for kind in _KINDS}
    _add_rates(result, files, ceilings, ceiling_share=0.9)
    best = min(_KINDS, key=lambda kind: median(result.samples[f"tierload ({kind})"]))
    seconds = result.samples[f"tierload ({best})"]
    result.add(Figure.of(f"the faster one ({best})", seconds, "s", limit=files.nbytes / 2.3e9))
    result.add(Figure.of("O_DIRECT reads", [rate / 1e9 for rate in reads], "GB/s"))
    files.add_peaks(result, drop_cached)
    keep(result)


def test_warm(benchmark, scale, files, keep):
    result = Result("gpu-load-warm", "Warm load to an accelerator: 6 GiB", _WARM_HOW, files.folder)
    segments = sorted((files.folder / "off" / "seg").iterdir())
    cached = {threads: page_cache(segments, threads, pinned=files.device == "cuda") for threads in (8, 16)}
    copies = host_to_device(scale.of(1 << 30, 1 << 20), files.device)
    rates: dict[str, list[float]] = {"page cache, 8 threads": [], "page cache, 16 threads": [], "PCIe": []}

    def measure() -> None:
        _read(files.folder / "off")
        for threads, read in cached.items():
            rates[f"page cache, {threads} threads"].append(read())
        rates["PCIe"].append(copies())

    files.spoil()
    result.samples = take_turns(files.tasks(_read), rounds=scale.of(3, 1), change=measure)
    rates = {name: values[1:] for name, values in rates.items()}
    benchmark.pedantic(lambda: None, rounds=1)
    ceiling = [min(max(small, large), copy) for small, large, copy in zip(*rates.values(), strict=True)]
    _add_rates(result, files, {"off": ceiling}, ceiling_share=0.8)
    for name, values in rates.items():
        result.add(Figure.of(name, [value / 1e9 for value in values], "GB/s"))
    files.add_peaks(result, _read)
    keep(result)


@pytest.mark.parametrize("kind", _KINDS)
def test_hot_start(benchmark, scale, files, keep, kind):
    result = Result(f"gpu-hot-{kind}", f"Hot start on an accelerator ({kind}): 6 GiB, cold", _HOT_HOW, files.folder)
    store, device = files.folder / kind, files.device
    weights = nbytes_of(files.run.model.state_dict())
    needed = weights / files.nbytes
    found: dict[str, list[float]] = {"load": [], "returned": [], "first output": [], "everything": [], "÷ load": []}

    def made() -> dict[str, object]:
        model = Llama.made(files.run.model.shape, device, seed=7)
        return {"model": model, "optimizer": AdamW(model.parameters(), lr=3e-4)}

    def load() -> None:
        state = made()
        drop_cached(store)
        synchronize(device)
        start = time.perf_counter()
        tierload.load(store, into=state)
        synchronize(device)
        found["load"].append(time.perf_counter() - start)

    def hot_start() -> None:
        state = made()
        drop_cached(store)
        synchronize(device)
        start = time.perf_counter()
        boot = tierload.hot_start(store, state["model"], state["optimizer"])
        found["returned"].append(time.perf_counter() - start)
        with torch.no_grad():
            output = state["model"](files.run.tokens).float().sum().item()
        found["first output"].append(time.perf_counter() - start)
        boot.join()
        synchronize(device)
        found["everything"].append(time.perf_counter() - start)
        boot.close()
        outputs.append(output)

    outputs: list[float] = []
    for number in range(scale.of(3, 1)):
        for act in (load, hot_start) if number % 2 else (hot_start, load):
            act()
        found["÷ load"].append(found["first output"][-1] / (needed * found["load"][-1]))
    tierload.load(store, into=files.run.state)
    with torch.no_grad():
        expected = files.run.model(files.run.tokens).float().sum().item()
    assert outputs == [expected] * len(outputs)
    benchmark.pedantic(lambda: None, rounds=1)
    result.samples = found
    for name in ("load", "returned", "first output", "everything"):
        result.add(Figure.of(name, [value * 1e3 for value in found[name]], "ms"))
    result.add(Figure("needed", needed, ""))
    result.add(Figure.of("first output ÷ (needed · load)", found["÷ load"], "", limit=1.2))
    keep(result)
