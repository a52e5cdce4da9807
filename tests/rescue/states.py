"""States of all kinds for tests: every dtype, shared memory, typed values, real-looking training state."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tierload import RNG, File, Folder
from tierload.rescue.manifest import SIZES

DTYPES = [getattr(torch, name) for name in SIZES if hasattr(torch, name)]
SHELLS = DTYPES[22:]


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    weights: object
    name: str = "n"


def random_bytes(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, nan with any payload among them."""
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = torch.from_numpy(random_bytes(count * dtype.itemsize, seed))
    return (data & 1 if dtype is torch.bool else data).view(dtype).reshape(shape)


def every_dtype(elements: int) -> dict[str, Any]:
    """All dtypes as a scalar, empty, small, and with `elements` elements, the large ones at first and in the middle."""
    state: dict[str, Any] = {}
    for seed, dtype in enumerate(DTYPES):
        name = str(dtype).removeprefix("torch.")
        shapes = {"scalar": (), "empty": (0, 3), "few": (3, 1, 5), "many": (elements // 8, 8)}
        state[name] = {kind: filled(dtype, shape, seed) for kind, shape in shapes.items()}
    return state


def real_looking(scale: int) -> dict[str, Any]:
    """What compresses, and by which method: weights, moments, masks, counts, tokens, zeros; `scale` · 1024 elements."""
    maker = torch.Generator().manual_seed(scale)
    weights = torch.randn(scale, 1024, generator=maker) * 0.02
    sparse = torch.zeros(scale, 1024, dtype=torch.int64)
    sparse[:, ::97] = 5
    text = b"the quick brown fox jumps over the lazy dog. " * (20 * scale)
    return {
        "fp32": weights,
        "bf16": weights.bfloat16(),
        "fp16": weights.half(),
        "fp64": weights[: scale // 2 + 1].double(),
        "fp32 of bf16": weights.bfloat16().float(),
        "moments": weights.square() * 1e-4,
        "mask": weights > 0.03,
        "tokens": torch.randint(0, 50_000, (scale * 1024,), generator=maker),
        "counts": torch.arange(scale * 1024, dtype=torch.int32),
        "complex": torch.complex(weights, weights.flip(1)),
        "fp8": weights.to(torch.float8_e4m3fn),
        "sparse": sparse,
        "zeros": torch.zeros(scale, 1024),
        "text": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        "noise": filled(torch.uint8, (scale * 1024,)),
    }


def shared_memory() -> dict[str, Any]:
    """Ties, views of one another, gaps, overlaps, other dtypes over the same bytes, conj, neg, expanded ones."""
    base = torch.randn(40, 50)
    numbers = torch.randn(30, dtype=torch.complex64)
    buffer = torch.arange(1000, dtype=torch.float64)
    gaps, alone, scattered = torch.randn(20, 30), torch.randn(8, 100), torch.arange(5.0)
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    return {
        "z": base,
        "a": base.T,
        "same": base,
        "row": base[3],
        "column": base[:, 7],
        "block": base[5:9, 10:20],
        "step": base[::3, 1::2],
        "bits": base.view(torch.int32),
        "bytes": base.view(torch.uint8)[2:5, 3:17],
        "wide": base[0, :1].expand(6, 1).expand(6, 9),
        "numbers": numbers,
        "conj": numbers.conj(),
        "half": numbers[::2].conj(),
        "imag": numbers.conj().imag,
        "real": numbers.real,
        "conj alone": torch.randn(6, dtype=torch.complex128).conj(),
        "neg alone": torch.randn(6, dtype=torch.complex128).conj().imag,
        "windows": buffer.unfold(0, 10, 5),
        "part": buffer[990:],
        "far": torch.zeros(100_000)[::99_999],
        "gaps": gaps[:, 3:9],
        "gaps again": gaps[:, 3:9].T,
        "packed": alone[::2, 10:20],
        "scattered": scattered.as_strided((3, 2), (1, 1)),
        "ones": torch.randn(1, 5, 1).transpose(0, 2),
        "parameter": parameter,
        "its data": parameter.data,
        "grad": torch.randn(3, requires_grad=True),
        "odd": torch.from_numpy(random_bytes(65, 1)[1:].view(np.float16))[3:20],
        "empty": torch.empty(0, 5).T,
    }


def typed_values(folder: Path) -> dict[str, Any]:
    """Bytes, arrays, files, and tensors below keys of every type."""
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a" * 5000)
    (folder / "inner" / "b~c.bin").write_bytes(bytes(range(256)))
    (folder / "empty").touch()
    (folder / "link").symlink_to("a.txt")
    listed = [torch.ones(2)]
    keys: list[Any] = [
        "1",
        1,
        "#1",
        "",
        "a/b",
        "~",
        "ä",
        "\U0001f600",
        "\ud83d\ude00",
        "\udc80",
        None,
        False,
        2.5,
        -0.25,
    ]
    keys += [float("inf"), float("nan"), 1 << 62, 1 << 63, -(1 << 63), -(1 << 70), 1 + 2j, b"\xff'", b"~/", ("x",), ()]
    keys += [(1, "ä/", (None, 2.0)), (1 << 64, True), frozenset({2, "b"}), Colour.RED, datetime.date(2024, 5, 6)]
    keys += [("t", Colour.RED), np.float32(1.5), "state", "__metadata__"]
    plain = {
        "none": None,
        "pi": 3.14,
        "big": 1 << 100,
        "nan": float("nan"),
        "z": 1j,
        "s": "\ud83d\ude00",
        "n": (1, {2}),
    }
    arrays = {
        "c": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
        "f": np.asfortranarray(np.random.default_rng(1).standard_normal((30, 40))),
        "strided": np.arange(100)[::7],
        "big endian": np.arange(9, dtype=">u4"),
        "text": np.array(["a", "längst"]),
        "bytes": np.array([b"x", b"yz"]),
        "times": np.array(["2024-01-01"], "datetime64[ns]"),
        "scalar": np.array(7.0),
        "empty": np.empty((3, 0)),
        "long": random_bytes(70_000, 3),
        "bool": np.eye(3) > 0,
    }
    return {
        "keys": {key: torch.full((3,), number) for number, key in enumerate(keys)},
        "text keys": {key: torch.full((3,), number) for number, key in enumerate(keys) if type(key) is str},
        "plain": plain,
        "list": [None, [torch.zeros(1)], (torch.ones(1), {"deep": torch.ones(())})],
        "again": [listed, listed, {"in": listed}],
        "deque": collections.deque([torch.ones(2), 1], maxlen=5),
        "default": collections.defaultdict(list, {3: [torch.ones(2)]}),
        "ordered": collections.OrderedDict([("b", torch.ones(1)), (1, torch.zeros(1))]),
        "counter": collections.Counter("abca"),
        "pair": Pair(torch.ones(3), Pair(np.ones(2), None)),
        "record": Record(torch.ones(4)),
        "short": b"short",
        "long": b"long" * 2000,
        "blob": bytearray(range(256)) * 40,
        "arrays": arrays,
        "file": File(folder / "a.txt"),
        "folder": Folder(folder),
    }


class Tiny(torch.nn.Module):
    """Tied weights, a buffer, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, 8)
        self.mix = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
        self.head = torch.nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.mix(self.embed(tokens)))
        return result

    def get_extra_state(self) -> object:
        return {"seen": torch.tensor(5), "name": "tiny"}

    def set_extra_state(self, state: object) -> None:
        pass


class Training:
    """A run: `state` is what it saves, `step` trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.other = torch.nn.Linear(3, 3)
        self.sgd = torch.optim.SGD(self.other.parameters(), momentum=0.9, lr=0.1)
        self.named = torch.optim.Adagrad(torch.nn.Linear(2, 2).named_parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)

    def step(self) -> None:
        logits = self.model(torch.randint(0, 30, (16,)))
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(16).long()) + self.other(torch.randn(2, 3)).sum()
        torch.autograd.backward(loss)
        for optimizer in (self.optimizer, self.sgd):
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "runs": [{"weights": dict(self.other.named_parameters()), "sgd": self.sgd}, self.named],
            "schedule": self.schedule,
            "dict": self.model.state_dict(),
            "rng": RNG(),
            "generators": [random.Random(1), np.random.default_rng(2), np.random.RandomState(3), np.random.MT19937(4)],
            "torch": torch.Generator().manual_seed(5),
        }
