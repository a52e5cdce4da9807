"""What a state has by docs/FORMAT.md section 8, without the engine: keys, and for each dtype, shape and bytes."""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import enum
import json
import os
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierload import RNG, File, Folder
from tierload.rescue.manifest import Tensor

LONG_BYTES = 4096  # bytes from this length on are a chunk
_SAME = object()  # in place of an element: the value stands at its holder's own key
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COUNTED = (list, dict, set, collections.deque, bytearray, np.ndarray)  # and what has a state_dict, dataclasses, RNGs
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator, torch.Generator, RNG)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as a program sees them: conjugated and negated where the tensor is."""
    seen = tensor.detach().resolve_conj().resolve_neg().cpu()
    size = seen.element_size()
    if size == 16:
        seen = torch.view_as_real(seen)
        size = 8
    return seen.view(_SAME_SIZE[size]).contiguous().numpy().tobytes() if seen.numel() else b""


def tensor_of(tensor: torch.Tensor) -> Tensor:
    """dtype name, shape and bytes."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes_of(tensor)


def parts_of(tensor: Any) -> dict[str, torch.Tensor] | None:
    """What a sparse, quantized or nested tensor, or one of a wrapper subclass, is made of; None for any other."""
    bare = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return {"indices": bare._indices(), "values": bare._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow_indices": bare.crow_indices(), "col_indices": bare.col_indices(), "values": bare.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {"ccol_indices": bare.ccol_indices(), "row_indices": bare.row_indices(), "values": bare.values()}
    if tensor.layout is torch.jagged:
        lengths = {} if bare.lengths() is None else {"lengths": bare.lengths()}
        return {"values": bare._values, "offsets": bare.offsets(), **lengths}
    if tensor.is_nested:
        pieces = bare.unbind()
        sizes = torch.tensor([list(piece.shape) for piece in pieces], dtype=torch.int64)
        flat = [piece.reshape(-1) for piece in pieces]
        values = torch.cat(flat) if flat else torch.empty(0, dtype=tensor.dtype)
        return {"values": values, "sizes": sizes.reshape(len(pieces), -1) if pieces else sizes.reshape(0, 0)}
    if tensor.is_quantized:
        if bare.qscheme() is torch.per_tensor_affine:
            scale = torch.tensor(bare.q_scale(), dtype=torch.float64)
            zero_point = torch.tensor(bare.q_zero_point(), dtype=torch.int64)
        else:
            scale, zero_point = bare.q_per_channel_scales(), bare.q_per_channel_zero_points()
        return {"int_repr": bare.int_repr(), "scale": scale, "zero_point": zero_point}
    if hasattr(tensor, "__tensor_flatten__"):
        return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return None


def expected_tensors(state: object) -> dict[str, Tensor]:
    """The keys that a saved state has, and for each its dtype name, shape and bytes."""
    walk = _Walk(state)
    walk.visit(state, ())
    return walk.found


def _literal(value: object) -> str | None:
    """The Python literal of a key in ASCII; integers from 2⁶³ on are hexadecimal."""
    if type(value) is tuple:
        parts = [_literal(part) for part in value]
        if any(part is None for part in parts):
            return None
        return "(" + ", ".join(map(str, parts)) + (",)" if len(parts) == 1 else ")")
    if type(value) is int and not -(1 << 63) < value < 1 << 63:
        return hex(value)
    return ascii(value) if type(value) in (str, int, float, complex, bool, bytes, type(None)) else None


def _json(value: Any) -> Any:
    """The V of a key, as far as the tests have such keys."""
    if type(value) in (bool, str, type(None)) or (type(value) is int and abs(value) < 1 << 63):
        return value
    if type(value) is int:
        return {"int": hex(value)}
    if type(value) is float:
        return value if np.isfinite(value) else {"float": str(value)}
    if isinstance(value, enum.Enum):
        kind = type(value)
        of = f"{kind.__module__}:{kind.__qualname__}"
        return {"enum": {"type": of, "name": value.name, "value": _json(value.value)}}
    if type(value) is frozenset:
        return {"frozenset": sorted(map(_json, value), key=_text)}
    if type(value) is tuple:
        return {"tuple": [_json(part) for part in value]}
    if type(value) is datetime.date:
        return {"date": value.isoformat()}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return {"npscalar": {"dtype": value.dtype.str, "data": base64.b64encode(value.tobytes()).decode()}}
    raise NotImplementedError(f"a key of type {type(value)}")


def _text(node: Any) -> str:
    return json.dumps(node, separators=(",", ":"))


def element(key: object) -> str:
    """One element of a key."""
    if isinstance(key, str):
        escaped = key.replace("~", "~0").replace("/", "~1")
        return "~2" + escaped[1:] if escaped.startswith("#") else escaped or "~3"
    return "#" + (_literal(key) or _text(_json(key))).replace("~", "~0").replace("/", "~1")


class _Walk:
    """Visits a state in writing order, and keeps what it met, so that no identity is used twice."""

    def __init__(self, state: object) -> None:
        self.state, self.found, self.met = state, dict[str, Tensor](), dict[int, object]()

    def visit(self, value: Any, path: tuple[str, ...]) -> None:
        stateful = callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
        data = dataclasses.is_dataclass(value) and not isinstance(value, type)
        long = isinstance(value, bytes) and len(value) >= LONG_BYTES
        if isinstance(value, (*_COUNTED, *_GENERATORS)) or stateful or data or long:
            if id(value) in self.met and not long:
                return  # a `ref`
            self.met[id(value)] = value
        if isinstance(value, torch.Tensor):
            parts = parts_of(value)
            if parts is None:
                self.put(path, *tensor_of(value))
            elif id(value) not in self.met:
                self.met[id(value)] = value
                for name, part in parts.items():
                    self.visit(part, (*path, "~." + name.replace("~", "~0").replace("/", "~1")))
        elif isinstance(value, np.ndarray):
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            self.put(path, "uint8", (value.nbytes,), value.tobytes(order))  # type: ignore[arg-type]
        elif isinstance(value, bytes | bytearray):
            if len(value) >= LONG_BYTES:
                self.put(path, "uint8", (len(value),), bytes(value))
        elif isinstance(value, File):
            self.file(Path(str(value.path)), path)
        elif isinstance(value, Folder):
            self.folder(Path(str(value.path)), path)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizer(value, path)
        else:
            for name, inner in list(_children(value)):
                self.visit(inner, path if name is _SAME else (*path, element(name)))

    def put(self, path: tuple[str, ...], dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        key = "/".join(path)
        assert self.found.get(key, (dtype, shape, data)) == (dtype, shape, data), f"two tensors have the key {key!r}"
        self.found[key] = dtype, shape, data

    def file(self, place: Path, path: tuple[str, ...]) -> None:
        if data := place.read_bytes():
            self.put(path, "uint8", (len(data),), data)

    def folder(self, place: Path, path: tuple[str, ...]) -> None:
        for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
            inside = not entry.is_symlink()
            if inside and entry.is_dir():
                self.folder(Path(entry), (*path, element(entry.name)))
            elif inside:
                self.file(Path(entry), (*path, element(entry.name)))

    def optimizer(self, value: torch.optim.Optimizer, path: tuple[str, ...]) -> None:
        packed: dict[str, Any] = value.state_dict()
        self.met[id(packed)] = packed
        names = _parameter_names(value, self.state)
        self.visit(packed.pop("param_groups"), (*path, "param_groups"))
        for key, state in packed.pop("state").items():
            name = names[key] if isinstance(key, int) and names[key] is not None else key
            self.visit(state, (*path, "state", element(name)))
        self.visit(packed, path)


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a value holds, with the elements of their keys; `_SAME`: the same key."""
    if isinstance(value, RNG):
        numbers: Any = np.random.get_state(legacy=False)
        return [("python", random.getstate()), ("numpy", numbers), ("torch", torch.get_rng_state())]
    if isinstance(value, torch.Generator):
        return [("state", value.get_state())]
    if isinstance(value, np.random.RandomState):
        return [(_SAME, value.get_state(legacy=False))]
    if isinstance(value, np.random.Generator):
        return [(_SAME, value.bit_generator.state)]
    if isinstance(value, np.random.BitGenerator):
        return [(_SAME, value.state)]
    if callable(getattr(value, "state_dict", None)):
        return [(_SAME, value.state_dict())]
    if isinstance(value, slice):
        return enumerate((value.start, value.stop, value.step))
    if isinstance(value, Mapping):
        return [*value.items(), (_SAME, getattr(value, "_metadata", None))]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple | collections.deque):
        return enumerate(value)
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return ()


def _parameter_names(optimizer: torch.optim.Optimizer, state: object) -> list[str | None]:
    """For each parameter, in the order of torch's positions, the key that the state has for it."""
    keys: dict[int, list[str]] = collections.defaultdict(list)
    memory: dict[Any, list[str]] = collections.defaultdict(list)

    seen = set[int]()

    def look(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, torch.Tensor):
            keys[id(value)].append("/".join(path))
            memory[_memory(value)].append("/".join(path))
        elif isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters(remove_duplicate=False):
                look(parameter, (*path, element(name)))
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            for name, inner in _children(value):
                look(inner, path if name is _SAME else (*path, element(name)))

    look(state, ())
    order = list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
    own = {
        id(p): name
        for group in optimizer.param_groups
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    names = [min(keys[id(p)] or memory[_memory(p)], default=own.get(id(p))) for p in order]
    return [None if name in names[:at] else name for at, name in enumerate(names)]


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr() if tensor.numel() else None, tensor.shape, tensor.stride(), tensor.dtype
