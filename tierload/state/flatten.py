"""A state → chunks of bytes and the document that describes it (docs/FORMAT.md section 8)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from tierload.errors import UnsupportedValue
from tierload.state import compound_writing, files, modules, optimizers, rng
from tierload.state.chunking import Chunk, chunks_of
from tierload.state.compounds import is_compound
from tierload.state.containers import COUNTED, ENCODERS, Parts, member_encoder, unsupported
from tierload.state.dtypes import UINT8
from tierload.state.keys import DEPTH_MAX, ROOT, Path
from tierload.state.names import ParameterNames
from tierload.state.pause import paused_collection
from tierload.state.scalars import WRITERS, Unwritable, numpy_dtype
from tierload.state.sources import source, view_json
from tierload.state.tensors import TensorLeaf, refusal
from tierload.state.texts import base64_text, quoted
from tierload.types import ChunkSource, FlatState

__all__ = ["flatten"]

_BLOB_MIN = 4096
"""Bytes from this length on get a chunk of their own."""

_ADVICE = (
    "use tensors, numbers, text, containers of them, dataclasses, or objects with state_dict(); "
    "to pickle it, pass allow_pickle=True"
)


def flatten(state: object, *, allow_pickle: bool = False) -> FlatState:
    """Describe ``state``: where each tensor's bytes are, and everything else as a document.

    No tensor is copied, but for those on other devices and views with gaps; the caller keeps the state unchanged until
    the bytes are written.

    Raises:
        UnsupportedValue: Something in the state cannot be stored; the message says where it is and what to do.
    """
    writer = _Writer(state, allow_pickle)
    with paused_collection():
        writer.write()
        return writer.flat()


class _Blob:
    """Raw bytes that get a chunk; ``slot`` is where its number goes in the document."""

    __slots__ = ("data", "key", "slot")

    def __init__(self, key: str, slot: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.key = key
        self.slot = slot
        self.data = data


class _Writer:
    """Writes the document without recursion: ``write`` keeps the text and values that are still to come on a stack."""

    def __init__(self, state: object, allow_pickle: bool) -> None:
        self._state = state
        self._allow_pickle = allow_pickle
        self._out: list[str] = ['{"version":1,"root":']
        self._tensors: list[TensorLeaf] = []
        self._blobs: list[_Blob] = []
        self._notes: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # what has an identity in _seen must not be freed before the end
        self._count = 0
        self._open: set[int] = set()
        self._names: ParameterNames | None = None
        own: dict[type, Callable[[Any, Path], Parts]] = {
            bytes: self._bytes,
            bytearray: self._bytes,
            np.ndarray: self._array,
            np.memmap: self._array,
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            files.File: self._file,
            files.Folder: self._folder,
            rng.RNG: rng.encode,
            _Opened: self._close,
        }
        self._encoders = ENCODERS | own | dict.fromkeys(rng.GENERATORS, rng.encode)
        self._counted = COUNTED | {bytearray, np.ndarray, np.memmap, rng.RNG, *rng.GENERATORS}

    def write(self) -> None:
        """Write the whole document, with empty slots for the numbers of chunks."""
        out, encoders, counted = self._out, self._encoders, self._counted
        stack: Parts = [(self._state, ROOT)]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                out.append(item)
                continue
            value, path = item
            kind = type(value)
            write = WRITERS.get(kind)
            try:
                if write is not None:
                    out.append(write(value))
                    continue
                encode = encoders.get(kind)
                is_counted = kind in counted
                if encode is None:
                    encode, is_counted = self._other(value, path)
                if is_counted:
                    reference = self._met(value)
                    if reference:
                        out.append(reference)
                        continue
                if path.depth > DEPTH_MAX:
                    raise Unwritable(f"the state nests deeper than {DEPTH_MAX} levels here")
                stack.extend(reversed(encode(value, path)))
            except Unwritable as error:
                raise unsupported(value, path, str(error)) from error
        out.append("}")

    def flat(self) -> FlatState:
        """Number the chunks, fill the slots, and hand everything over."""
        notes: list[str] = []
        rows: list[Chunk | TensorLeaf | _Blob] = [*chunks_of(self._tensors, notes), *self._blobs]
        self._notes += sorted(notes)  # they come in the order of addresses
        rows.sort(key=attrgetter("key"))  # code points are in the order of their UTF-8
        sources: list[ChunkSource] = []
        ties, last = 0, None
        apart: dict[int, int] = {}
        for number, row in enumerate(rows):
            key = row.key
            if key == last:
                raise UnsupportedValue(f"two tensors in the state have the key {key!r}; a dict has keys of equal text")
            last = key
            if type(row) is TensorLeaf:
                self._out[row.slot] = f'{{"chunk":{number},"shape":[{",".join(map(str, row.shape))}]{row.marks}}}'
                sources.append(source(key, row.row, row.shape, row.start, row.nbytes, row.tensor))
            elif isinstance(row, _Blob):
                self._out[row.slot] = str(number)
                length = row.data.nbytes
                pointer = row.data.ctypes.data if length else 0
                sources.append(source(key, UINT8, (length,), pointer, length, row.data))
            elif isinstance(row, Chunk):
                tie = ""
                if len(row.views) > 1:
                    tie = f',"tie":{ties}'
                    ties += 1
                if row.apart is not None:
                    tie += f',"apart":{apart.setdefault(id(row.apart), len(apart))}'
                for view in row.views:
                    self._out[view.leaf.slot] = view_json(number, row, view, tie)
                sources.append(source(key, row.row, row.sizes, row.pointer, row.nbytes, row.owner, row.strides))
        return FlatState(tuple(sources), "".join(self._out).encode("ascii"), tuple(self._notes))

    def _met(self, value: object) -> str:
        """Count a value whose identity is kept; the reference to it when it has been met before, else no text."""
        number = self._seen.get(id(value))
        if number is not None:
            if id(value) in self._open:
                raise Unwritable("its own state refers to it")
            return f'{{"ref":{number}}}'
        self._seen[id(value)] = self._count
        self._count += 1
        self._kept.append(value)
        return ""

    def _other(self, value: object, path: Path) -> tuple[Callable[[Any, Path], Parts], bool]:
        """How a value of no built-in type is written, and whether references count it."""
        if is_compound(value):
            return self._compound, False  # it counts itself
        if isinstance(value, torch.Tensor) and not self._allow_pickle:
            raise refusal(value, path)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer, True
        if modules.is_stateful(value):
            return self._object, True
        found = member_encoder(value)
        if found is not None:
            return found
        if not self._allow_pickle:
            raise unsupported(value, path, _ADVICE)
        return self._pickle, False

    def _slot(self, text: str) -> int:
        """Write ``text`` and leave a place for what is known only when the chunks are numbered."""
        self._out.append(text)
        self._out.append("")
        return len(self._out) - 1

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Parts:
        if is_compound(tensor):
            return self._compound(tensor, path)
        self._tensors.append(TensorLeaf(tensor, path, self._slot('{"t":')))
        return ["}"]

    def _compound(self, tensor: torch.Tensor, path: Path) -> Parts:
        reference = self._met(tensor)
        return [reference] if reference else self._opened(tensor, compound_writing.encode(tensor, path))

    def _blob(self, path: Path, data: np.ndarray[Any, np.dtype[np.uint8]], text: str) -> None:
        self._blobs.append(_Blob(path.text(), self._slot(text), data))

    def _bytes(self, value: bytes | bytearray, path: Path) -> Parts:
        kind = type(value).__name__
        if len(value) < _BLOB_MIN:
            return [f'{{"{kind}":"{base64_text(value)}"}}']
        if kind == "bytes":  # a bytearray has been counted already
            self._count += 1
        else:
            value = bytes(value)  # a view of a bytearray would keep the user from resizing it
        self._blob(path, np.frombuffer(value, np.uint8), '{"blob":{"chunk":')
        return [f',"as":"{kind}"}}}}']

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> Parts:
        dtype = numpy_dtype(value.dtype)
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        plain = np.asarray(value, order="F" if order == "F" else "C")
        flat = plain.reshape(-1, order="F" if order == "F" else "C").view(np.uint8) if plain.nbytes else _NOTHING
        self._blob(path, flat, '{"ndarray":{"chunk":')
        shape = ",".join(map(str, value.shape))
        return [f',"dtype":{quoted(dtype)},"shape":[{shape}],"order":"{order}"}}}}']

    def _object(self, value: Any, path: Path) -> Parts:
        return self._opened(value, modules.encode(value, path))

    def _optimizer(self, value: torch.optim.Optimizer, path: Path) -> Parts:
        if self._names is None:
            self._names = ParameterNames(self._state)
        return self._opened(value, optimizers.encode(value, path, self._names, self._notes))

    def _opened(self, value: object, parts: Parts) -> Parts:
        """The parts of an object, which refuses references to itself until they are written."""
        self._open.add(id(value))
        return [*parts, (_Opened(value), ROOT)]

    def _close(self, opened: _Opened, path: Path) -> Parts:
        self._open.discard(id(opened.value))
        return []

    def _file(self, value: files.File, path: Path) -> Parts:
        return self._entry(files.read_file(value, path), path)

    def _folder(self, value: files.Folder, path: Path) -> Parts:
        return self._entry(files.read_folder(value, path, self._notes), path)

    def _entry(self, entry: files.Entry, path: Path) -> Parts:
        """A file, link or folder; the recursion is as deep as the folders, which ``files`` bounds."""
        if isinstance(entry, files.LinkEntry):
            return [f'{{"link":{quoted(entry.target)}}}']
        if isinstance(entry, files.FileEntry):
            name = f',"name":{quoted(entry.name)}' if entry.name else ""
            self._out.append('{"file":{"chunk":')
            if entry.content.nbytes:
                self._blob(path, entry.content, "")
            else:
                self._out.append("null")
            return [f',"mode":{entry.mode}{name}}}}}']
        self._out.append('{"folder":{"entries":[')
        for position, (name, inner) in enumerate(entry.entries.items()):
            self._out.append(f"{',' if position else ''}[{quoted(name)},")
            self._out.extend(str(part) for part in self._entry(inner, path.child(name)))
            self._out.append("]")
        return ["]}}"]

    def _pickle(self, value: object, path: Path) -> Parts:
        try:
            data = pickle.dumps(value, protocol=4)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise unsupported(value, path, f"and it cannot be pickled either: {error}") from error
        return [f'{{"pickle":"{base64_text(data)}"}}']


class _Opened:
    """A mark on the writer's stack: everything that ``value`` gave has been written."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


_NOTHING = np.empty(0, np.uint8)
