"""The ways of a value: through the native core where that knows it, or through Python for everything.

The native core takes ordinary containers and tensors and leaves the rest to Python; which way a value goes must not
show. ``python_way()`` makes Python take all; ``portrait()`` says all there is to say of a value, to compare two.
"""

from __future__ import annotations

import collections
import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from alike import raw
from fake_engine import stored

from tierload import _native
from tierload.state import modules, optimizers
from tierload.state.dtypes import BY_DTYPE
from tierload.state.memory import Memory
from tierload.types import FlatState

flattening = importlib.import_module("tierload.state.flatten")  # the package has a function of this name

NO_EXCHANGE = _native.Torch(
    torch.Tensor,
    torch.nn.Parameter,
    [(row.torch, row.code, row.size, row.torch.is_floating_point, row.torch.is_complex) for row in BY_DTYPE.values()],
    None,
)
"""What the core asks a torch without DLPack's exchange interface: no tensor is plain."""


class Hidden:
    """A value that the native walk does not know, so that it asks Python."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


@contextmanager
def python_way() -> Iterator[None]:
    """Every value is encoded, decoded and bound by Python."""
    encode = flattening._Writer._encode

    def write(self) -> None:
        self._out.append('{"version":1,"root":')
        self._out.write(Hidden(self._state), flattening.ROOT, self._encode)
        self._out.append("}")

    def encode_hidden(self, value, path):
        parts = encode(self, value.value if type(value) is Hidden else value, path)
        return [part if type(part) is str else (Hidden(part[0]), part[1]) for part in parts]

    def fill_dict(self, nodes, into):
        into.update(dict.fromkeys(nodes))
        return list(nodes.items())

    def fill_list(self, nodes, into):
        into.extend([None] * len(nodes))
        return list(enumerate(nodes))

    with (
        mock.patch.multiple(flattening._Writer, write=write, _encode=encode_hidden),
        mock.patch.object(flattening, "TORCH", NO_EXCHANGE),
        mock.patch.object(modules, "known_state", return_value=None),
        mock.patch.object(optimizers, "known_state", return_value=None),
        mock.patch.multiple(
            Memory,
            fill_dict=fill_dict,
            fill_list=fill_list,
            fill_pairs=lambda self, pairs, into: None,
            bind=lambda self, live, nodes: list(live),
        ),
    ):
        yield


def outcome(act: Any) -> object:
    """What ``act`` gives, or the error that it raises as text."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - compared, not handled
        return f"{type(error).__name__}: {error}"


def facts_of(flat: FlatState) -> dict[str, object]:
    """All that the store is given of a state."""
    saved = stored(flat)
    return {
        "document": saved.document.decode(),
        "chunks": saved.infos,
        "data": saved.data,
        "notes": flat.notes,
        "devices": flat.devices.tolist(),
        "strides": dict(flat.strides),
        "item sizes": flat.item_sizes.tolist(),
        "floating": flat.floating.tolist(),
    }


def portrait(value: object) -> list[object]:
    """Types, order, bits, and which objects and which memory are the same ones, as a flat list."""
    lines: list[object] = []
    numbers: dict[int, int] = {}
    storages: dict[int, int] = {}
    kept = [value]  # ids are compared
    stack: list[tuple[object, object]] = [("", value)]
    while stack:
        name, it = stack.pop()
        kept.append(it)
        line: list[object] = [name, type(it).__name__]
        if isinstance(it, (dict, list, tuple, collections.deque, torch.Tensor)) and not isinstance(it, torch.Size):
            met = id(it) in numbers
            line.append(numbers.setdefault(id(it), len(numbers)))
            if met:
                lines.append(line)
                continue
        if isinstance(it, torch.Tensor) and (it.is_meta or it.layout is not torch.strided):
            line += [it.dtype, it.shape, it.device, it.layout]
        elif isinstance(it, torch.Tensor):
            start = it.untyped_storage().data_ptr()
            memory = storages.setdefault(start, len(storages)) if it.numel() else None
            line += [it.dtype, it.shape, it.stride(), it.storage_offset(), memory, it.requires_grad, it.is_leaf]
            line += [it.is_conj(), it.is_neg(), raw(it)]
        elif isinstance(it, dict):
            line += [len(it), getattr(it, "default_factory", None)]
            below = [(repr((type(key).__name__, key)), inner) for key, inner in it.items()]
            if getattr(it, "_metadata", None) is not None:
                below.append(("metadata", it._metadata))
            stack += reversed(below)
        elif isinstance(it, (list, tuple, collections.deque)):
            line += [len(it), getattr(it, "maxlen", None)]
            stack += reversed(list(enumerate(it)))
        else:
            line.append(repr(it))
        lines.append(line)
    return lines


def tensors_of(value: object) -> list[torch.Tensor]:
    """Every tensor in a state, once."""
    found, seen, stack = [], set(), [value]
    while stack:
        it = stack.pop()
        if id(it) in seen:
            continue
        seen.add(id(it))
        if isinstance(it, torch.Tensor):
            found.append(it)
        stack += it.values() if isinstance(it, dict) else it if isinstance(it, (list, tuple, collections.deque)) else []
    return found


TEXTS = [
    "",
    "a",
    "b",
    "#",
    "#1",
    "~",
    "/",
    "a/b",
    '"',
    "\\",
    "\x7f",
    "\x1f",
    "\0",
    "é",
    "\ud800",
    "\udc00",
    "\U0001f600",
]
INTEGERS = [0, 1, -1, 2**62, 2**63 - 1, 2**63, -(2**63) + 1, -(2**63), -(2**63) - 1, 10**30]
FLOATS = [0.0, -0.0, 1.0, 0.1, 1e300, 5e-324, 1e16, float("inf"), -float("inf"), float("nan"), -float("nan")]
OTHERS = [None, True, False, 1j, b"bytes", bytes(5000), torch.float16, torch.Size((1, 2)), range(3), frozenset({1})]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.uint16, torch.float8_e4m3fn]


class Maker:
    """Makes states at random, the same for the same seed, with ties, references, and all ways to hold a tensor."""

    def __init__(self, seed: int, plain: bool = False) -> None:
        self.random = random.Random(seed)
        self.plain = plain  # only tensors that a target may hold, and no references upwards
        self.base = self.fresh(torch.float32, (8, 8))
        self.tensors = [self.base]
        self.containers: list[Any] = []

    def state(self) -> dict[Any, Any]:
        top = {self.key(): self.value(0) for _ in range(self.random.randint(1, 5))}
        top["weights"] = {f"w{number}": self.tensor() for number in range(self.random.randint(1, 4))}
        return top

    def fresh(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.frombuffer(bytearray(self.random.randbytes(count + 1)), dtype=torch.uint8)[:count]
        return (data & 1).bool().view(shape) if dtype is torch.bool else data.clone().view(dtype).view(shape)

    def tensor(self) -> torch.Tensor:
        choose = self.random.choice
        shape = tuple(choose([0, 1, 2, 3]) for _ in range(choose([0, 1, 2, 2, 3])))
        leaf = self.fresh(torch.float32, shape)
        vector = self.fresh(torch.complex64, (4,))
        makers = [
            lambda: self.fresh(choose(DTYPES), shape),
            lambda: self.fresh(choose(DTYPES), shape),
            lambda: choose(self.tensors),
            lambda: self.base[choose([0, 2]) : choose([3, 8])],
            lambda: choose([self.base.t(), self.base[:, ::2], self.base[0], self.base.view(64), self.base[:4]]),
            lambda: vector.conj(),
            lambda: vector.conj().imag,
            lambda: vector.real,
            lambda: torch.nn.Parameter(leaf, requires_grad=choose([True, False])),
            lambda: leaf.requires_grad_(),
            lambda: torch.empty_strided((1, 3, 1), (choose([1, 3, 50]), 1, choose([1, 9]))).copy_(leaf.sum()),
            lambda: leaf[None].expand(2, *shape),
        ]
        if not self.plain:
            makers += [lambda: leaf.requires_grad_() * 2, lambda: self.inference(leaf)]
        tensor = choose(makers)()
        self.tensors.append(tensor)
        return tensor

    @staticmethod
    def inference(tensor: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return tensor + 1

    def key(self) -> Any:
        choose = self.random.choice
        text = choose(TEXTS) + choose(TEXTS)
        return choose([text, text, text, choose(INTEGERS), choose(FLOATS[:8]), choose([None, True, (1, "a"), b"k"])])

    def value(self, depth: int) -> Any:
        choose = self.random.choice
        kind = choose(["tensor", "scalar", "container", "container"] if depth < 4 else ["tensor", "scalar"])
        if kind == "tensor":
            return self.tensor()
        if kind == "scalar":
            return choose([choose(TEXTS) + choose(TEXTS), choose(INTEGERS), choose(FLOATS), choose(OTHERS)])
        if self.containers and choose([True, False, False]):
            return choose(self.containers)
        return self.container(depth)

    def container(self, depth: int) -> Any:
        choose = self.random.choice
        count = choose([0, 1, 2, 3])
        kind = choose(["dict", "dict", "list", "tuple", "odict", "state dict", "ddict", "deque", "counter"])
        values = [(self.key(), self.value(depth + 1)) for _ in range(count)]
        members = [value for _, value in values]
        if kind == "tuple":
            return tuple(members)
        if kind == "dict":
            holder: Any = dict(values)
        elif kind == "list":
            holder = members
        elif kind == "ddict":
            holder = collections.defaultdict(choose([None, list, int]), values)
        elif kind == "counter":
            holder = collections.Counter({key: number for number, (key, _) in enumerate(values)})
        elif kind == "deque":
            holder = collections.deque(members, maxlen=choose([None, 5]))
        else:
            holder = collections.OrderedDict(values)
            if values and choose([True, False]):
                holder.move_to_end(values[0][0])
            if kind == "state dict":
                holder._metadata = collections.OrderedDict({"": {"version": 1}, "x": choose([1, "é"])})
        if kind in ("dict", "list", "odict") and not self.plain and choose([True, False, False]):
            inner = choose([holder, *self.containers])  # around in a circle, or once more
            holder.append(inner) if kind == "list" else holder.__setitem__("inner", inner)
        self.containers.append(holder)
        return holder
