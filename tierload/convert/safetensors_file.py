"""safetensors, both ways: flat names to tensors, and texts.

What the format has no place for is in one text of the file's ``__metadata__``, ``tierload``: a state document
(docs/FORMAT.md section 8) of a dict with ``ties`` (further name → stored name), ``values`` (name → what is no tensor)
and ``modules`` (name of a state dict → torch's ``_metadata`` of it).
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch

from tierload.convert.bits import contiguous, difference
from tierload.errors import CorruptFile, TierloadError, UnsupportedValue
from tierload.state import NO_CHUNKS, flatten, plan_load
from tierload.state.compounds import is_compound, kind_of_tensor

__all__ = ["TEXTS", "Flat", "check", "read", "refusal", "root_texts", "state_of", "value_refusal", "write"]

TEXTS = "__metadata__"
"""Where a state keeps a file's texts: in the ``_metadata`` of its root, an OrderedDict; no tensor can have the name."""

OWN_TEXT = "tierload"
_FORMAT_TEXT = {"format": "pt"}  # transformers refuses a file without it


@dataclass(slots=True)
class Flat:
    """What a safetensors file, or a set of its shards, holds."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    modules: dict[str, object] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """The texts of the file, with what tierload keeps there."""
        own = {"ties": self.ties, "values": self.values, "modules": self.modules}
        texts = _FORMAT_TEXT | self.texts
        if any(own.values()):
            texts[OWN_TEXT] = flatten(own).document.decode("ascii")
        return texts


def refusal(name: str, tensor: torch.Tensor) -> str:
    """Why a file cannot hold a tensor under a name; empty when it can."""
    if name == TEXTS:
        return f"safetensors keeps the name {TEXTS} for itself"
    if not _is_utf8(name):
        return "its name has a lone surrogate, which UTF-8 has no bytes for"
    if is_compound(tensor):
        return f"safetensors does not take {kind_of_tensor(tensor)}"
    return _dtype_refusal(tensor.dtype, tensor.dim() == 0)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@functools.cache
def _dtype_refusal(dtype: torch.dtype, single: bool) -> str:
    # The library is asked, so that there is no second table of dtypes that differs from its own.
    element = torch.zeros(dtype.itemsize, dtype=torch.uint8)
    try:
        safetensors.serialize({"": _spec(dtype, () if single else (1,), element.data_ptr(), element.nbytes)})
    except safetensors.SafetensorError:
        return f"safetensors does not take {'single elements of ' if single else ''}{_name(dtype)}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(dtype: torch.dtype, shape: tuple[int, ...], pointer: int, count: int) -> safetensors.TensorSpec:
    return safetensors.TensorSpec(dtype=_name(dtype), shape=shape, data_ptr=pointer, data_len=count)


def write(tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str], path: Path) -> None:
    """Writes one file; the same content gives the same bytes.

    Raises:
        OSError: The disk is full or failed.
    """
    owners = [contiguous(tensor) for tensor in tensors.values()]
    specs = {
        name: _spec(tensor.dtype, tuple(tensor.shape), owner.data_ptr(), owner.nbytes)
        for (name, tensor), owner in zip(tensors.items(), owners, strict=True)
    }
    try:
        safetensors.serialize_file(specs, path, dict(texts))
    except safetensors.SafetensorError as error:
        raise _system_error(error, path) from error
    _sort_texts(path)


def _system_error(error: safetensors.SafetensorError, path: Path) -> OSError:
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        return OSError(f"{path}: {error}")
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def _sort_texts(path: Path) -> None:
    """Puts the texts of a file into order: the library writes them in that of a hash which differs in each process."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header[TEXTS] = dict(sorted(header[TEXTS].items()))
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(ordered) <= length:
            file.seek(8)
            file.write(ordered.ljust(length))


def check(tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str], path: Path) -> None:
    """Reads a file back and compares it with what was to be written.

    Raises:
        CorruptFile: It holds something else.
    """
    found, found_texts = _read_file(path)
    if found.keys() != tensors.keys() or found_texts != dict(texts):
        raise CorruptFile(f"{path}: the names or texts that were read back are not those that were written")
    for name, tensor in tensors.items():
        problem = difference(found[name], tensor)
        if problem:
            raise CorruptFile(f"{path}: what was read back of {name!r} is not what was written: {problem}")


def read(paths: tuple[Path, ...]) -> Flat:
    """The content of a file or of all its shards. Tensors are views of the mapped files: no byte of them is read yet.

    Raises:
        CorruptFile: A file is damaged or hostile, or two shards have the same name; it names file, tensor and reason.
    """
    flat = Flat()
    for path in paths:
        tensors, texts = _read_file(path)
        twice = sorted(tensors.keys() & flat.tensors.keys())
        if twice:
            raise CorruptFile(f"{path}: tensor {twice[0]!r} is in another shard too")
        flat.tensors |= tensors
        own = texts.pop(OWN_TEXT, None)
        flat.texts = texts | flat.texts
        if own is not None:
            _add_own(flat, own, path)
    wrong = [alias for alias, name in flat.ties.items() if name not in flat.tensors or alias in flat.tensors]
    if wrong:
        raise CorruptFile(f"{paths[0]}: its list of ties is wrong about {wrong[0]!r}")
    if flat.values.keys() & (flat.tensors.keys() | flat.ties.keys()):
        raise CorruptFile(f"{paths[0]}: a name is both a tensor and a value")
    return flat


def _read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    path.open("rb").close()  # the library's own errors do not say which file
    tensors: dict[str, torch.Tensor] = {}
    where = ""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            texts: dict[str, str] = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - it is no dict
                where = f", tensor {name!r}"
                tensors[name] = file.get_tensor(name)
    except (safetensors.SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise CorruptFile(f"{path}{where}: cannot be read as safetensors: {error}") from error
    return tensors, texts


def _add_own(flat: Flat, text: str, path: Path) -> None:
    try:
        own: Any = plan_load(text.encode(), NO_CHUNKS).finish()
    except (TierloadError, ValueError) as error:
        raise CorruptFile(f"{path}: its text {OWN_TEXT!r} is damaged: {error}") from error
    parts: list[Any] = [own.get(name) for name in ("ties", "values", "modules")] if isinstance(own, dict) else [None]
    if not all(type(part) is dict and all(type(name) is str for name in part) for part in parts):
        raise CorruptFile(f"{path}: its text {OWN_TEXT!r} is not what tierload writes")
    ties, values, modules = parts
    if not all(type(name) is str for name in ties.values()):
        raise CorruptFile(f"{path}: its list of ties is damaged")
    flat.ties |= ties
    flat.values |= values
    flat.modules |= modules


def state_of(flat: Flat) -> dict[str, object]:
    """The state that is stored for a file: its names to tensors and values, ties being one tensor.

    Raises:
        UnsupportedValue: The store has no such dtype.
    """
    state: dict[str, object] = {**flat.tensors, **flat.values}
    state |= {alias: flat.tensors[name] for alias, name in flat.ties.items()}
    metadata = flat.modules.get("")
    if not flat.texts and metadata is None:
        return state
    ordered = OrderedDict(state)
    kept = OrderedDict(metadata) if isinstance(metadata, dict) else OrderedDict()
    if flat.texts:
        kept[TEXTS] = flat.texts
    ordered._metadata = kept  # type: ignore[attr-defined]
    return ordered


def root_texts(state: object) -> dict[str, str]:
    """The texts of the file that a state came from; none when it came from nowhere, or they fit no file."""
    metadata = getattr(state, "_metadata", None)
    texts = metadata.get(TEXTS) if isinstance(metadata, dict) else None
    if not isinstance(texts, dict) or not texts:
        return {}
    if not all(type(each) is str and _is_utf8(each) for pair in texts.items() for each in pair):
        return {}
    return {name: text for name, text in texts.items() if name != OWN_TEXT}


def value_refusal(name: str, value: object) -> str:
    """Why a value that is no tensor cannot be kept among the texts; empty when it can."""
    try:
        flat = flatten({name: value})
    except UnsupportedValue as error:
        return str(error)
    return f"a {type(value).__qualname__} is no text, number or small value" if flat.chunks else ""
