"""Directories of torch.distributed.checkpoint, both ways. They are written by torch itself, and read without running
anything in them: the metadata is a pickle, of which only torch's own classes for it are let in."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from tierload.convert import torch_file
from tierload.convert.bits import problem_of
from tierload.convert.formats import METADATA, dcp_files
from tierload.convert.leaves import leaves
from tierload.errors import CorruptFile

__all__ = ["check", "read", "write"]

_CLASSES = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class _Writer(filesystem.FileSystemWriter):
    """Writes to a path under the name that it will have."""

    def __init__(self, path: Path, name: Path) -> None:
        super().__init__(path)
        self._name = name

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """What the metadata says."""
        return self._name


def write(state: dict[str, Any], folder: Path, name: Path) -> None:
    """Writes a directory that will be called ``name``, as one process that saves alone.

    Raises:
        OSError: The disk is full or failed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone
        try:
            save(state, storage_writer=_Writer(folder, name), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from error


def check(state: dict[str, Any], folder: Path) -> None:
    """Reads a directory back and compares it with what was to be written.

    Raises:
        CorruptFile: It holds something else.
    """
    found, expected = ({path.text(): value for path, value in leaves(each)} for each in (read(folder), state))
    if found.keys() != expected.keys():
        raise CorruptFile(f"{folder}: the keys that were read back are not those that were written")
    for key, value in expected.items():
        if problem := problem_of(found[key], value):
            raise CorruptFile(f"{folder}: what was read back at {key!r} is not what was written: {problem}")


def read(folder: Path) -> dict[str, Any]:
    """The state in a directory, nested as it was, with whole tensors.

    Raises:
        CorruptFile: Something is damaged or missing, or more than tensors and plain values, which might run code.
    """
    known = [_metadata(path) for path in dcp_files(folder) if path.name.endswith(METADATA)]
    if not known:
        raise CorruptFile(f"{folder}: has no {METADATA}: it is no checkpoint of DCP, or its save did not finish")
    data = _Data(folder, known)
    values: dict[str, Any] = {}
    paths: dict[str, object] = {}
    try:
        for one in known:
            planned = one.planner_data or {}
            for fqn in one.state_dict_metadata:
                paths[fqn] = planned.get(fqn, (fqn,))
                if fqn not in values:
                    values[fqn] = data.value(fqn)
        return _nested(values, paths)
    except torch_file.DAMAGE as error:
        if isinstance(error, CorruptFile):
            raise
        raise CorruptFile(f"{folder}: its metadata contradicts itself: {error!r}") from error


class _Unpickler(pickle.Unpickler):
    """Knows the classes of metadata, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of DCP's metadata")


def _metadata(path: Path) -> Metadata:
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except (*torch_file.DAMAGE, pickle.UnpicklingError, MemoryError) as error:
        raise CorruptFile(f"{path}: is no metadata of DCP that can be read safely: {error}") from error
    if (
        not isinstance(found, Metadata)
        or not isinstance(getattr(found, "state_dict_metadata", None), dict)
        or not isinstance(getattr(found, "storage_data", None), dict)
        or not isinstance(getattr(found, "planner_data", None), dict | None)
    ):
        raise CorruptFile(f"{path}: is no metadata of DCP's own storage")
    return found


class _Data:
    """The files, and where in them what is."""

    def __init__(self, folder: Path, known: Sequence[Metadata]) -> None:
        self._folder = folder
        self._known = known

    def value(self, fqn: str) -> Any:
        """What one key holds."""
        parts = [one.state_dict_metadata[fqn] for one in self._known if fqn in one.state_dict_metadata]
        if isinstance(parts[0], BytesStorageMetadata):
            return self._load(MetadataIndex(fqn), fqn)
        if not all(isinstance(part, TensorStorageMetadata) for part in parts):
            raise CorruptFile(f"{self._folder}: {fqn!r} is neither a tensor nor a value")
        return self._tensor(fqn, parts)  # type: ignore[arg-type]

    def _tensor(self, fqn: str, parts: Sequence[TensorStorageMetadata]) -> torch.Tensor:
        size, dtype = tuple(parts[0].size), parts[0].properties.dtype
        boxes = {tuple(chunk.offsets): tuple(chunk.sizes) for part in parts for chunk in part.chunks}
        where = f"{self._folder}: the tensor {fqn!r}"
        if any(tuple(part.size) != size or part.properties.dtype is not dtype for part in parts):
            raise CorruptFile(f"{where} has other shapes or dtypes in the metadata of some ranks")
        if problem := _gap(size, boxes):
            raise CorruptFile(f"{where} is not made up of its parts: {problem}")
        whole = torch.empty(size, dtype=dtype)
        for offsets, sizes in boxes.items():
            if 0 in sizes:
                continue
            part = self._load(MetadataIndex(fqn, offsets), fqn)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype is not dtype:
                raise CorruptFile(f"{where} has no part of {list(sizes)} {dtype} at {list(offsets)}")
            if part.untyped_storage().nbytes() < part.nbytes:  # DCP writes none such, and a few bytes could fill memory
                raise CorruptFile(f"{where} has a part at {list(offsets)} that shows its bytes several times")
            whole[tuple(slice(begin, begin + count) for begin, count in zip(offsets, sizes, strict=True))] = part
        return whole

    def _load(self, index: MetadataIndex, fqn: str) -> Any:
        info = next((one.storage_data[index] for one in self._known if index in one.storage_data), None)
        if not isinstance(info, filesystem._StorageInfo):
            raise CorruptFile(f"{self._folder}: the metadata does not say where {fqn!r} is")
        if getattr(info, "transform_descriptors", None):
            raise CorruptFile(
                f"{self._folder}: {fqn!r} was written through {', '.join(map(str, info.transform_descriptors or ()))}, "
                "which is not known here: load it with torch and save it anew"
            )
        name, begin, length = str(info.relative_path), info.offset, info.length
        path = self._folder / name
        if os.path.basename(name) != name or not path.is_file():
            raise CorruptFile(f"{self._folder}: the file {name!r} is not there")
        if min(begin, length) < 0 or begin + length > path.stat().st_size:
            raise CorruptFile(f"{path}: ends before byte {begin + length}, where {fqn!r} ends")
        with path.open("rb") as file:
            file.seek(begin)
            data = io.BytesIO(file.read(length))
        where = f"{path}: {fqn!r}, at byte {begin}"
        torch_file.check_sums(data, where)
        data.seek(0)
        with torch_file.refusals(where):
            return torch.load(data, map_location="cpu", weights_only=True)


def _gap(shape: tuple[int, ...], boxes: Mapping[tuple[int, ...], tuple[int, ...]]) -> str:
    """Why boxes (sizes by offsets) do not cover a tensor exactly; empty when they do."""
    begins = np.array(list(boxes), np.int64).reshape(len(boxes), len(shape))
    sizes = np.array(list(boxes.values()), np.int64).reshape(len(boxes), len(shape))
    ends = begins + sizes
    if (begins < 0).any() or (sizes < 0).any() or (ends > np.array(shape, np.int64)).any():
        return "one leaves it"
    count = sum(int(np.prod(one, dtype=object)) for one in sizes)
    if count != int(np.prod(np.array(shape, object), dtype=object)):
        return f"they have {count} elements"
    for number in range(len(boxes)):
        meet = (begins[number] < ends[number + 1 :]) & (begins[number + 1 :] < ends[number])
        if meet.all(axis=1).any() and sizes[number].all():
            return "two of them overlap"
    return ""


class _List(dict[int, Any]):
    """A list in the making."""


def _nested(values: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """The state that keys were made from: where a path has numbers, there were lists."""
    root: dict[Any, Any] = {}
    for fqn, value in values.items():
        container, path = root, paths[fqn]
        if type(path) is not tuple:
            raise CorruptFile(f"the key {fqn!r} has a {type(path).__name__} for a path")
        for element, following in pairwise(path):
            container = container.setdefault(element, _List() if type(following) is int else {})
            if type(container) is not (_List if type(following) is int else dict):
                raise CorruptFile(f"the key {fqn!r} is inside a value that has another one")
        if not path or any(type(element) not in (str, int) for element in path) or path[-1] in container:
            raise CorruptFile(f"the key {fqn!r} stands where another one does, or nowhere")
        container[path[-1]] = value
    return {key: _made(value) for key, value in root.items()}


def _made(value: Any) -> Any:
    if type(value) is _List:
        if sorted(value) != list(range(len(value))):
            raise CorruptFile(f"a list has elements {sorted(value)[:5]}..., some of which are missing")
        return [_made(value[number]) for number in range(len(value))]
    return {key: _made(inner) for key, inner in value.items()} if type(value) is dict else value
