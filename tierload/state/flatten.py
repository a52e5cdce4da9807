"""A state → chunks of bytes and the document that describes it (docs/FORMAT.md section 8)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from tierload import _native
from tierload.errors import UnsupportedValue
from tierload.state import compound_writing, files, modules, optimizers, rng, sharding
from tierload.state.chunking import Chunk, chunks_of
from tierload.state.compounds import is_compound
from tierload.state.containers import COUNTED, ENCODERS, Parts, member_encoder, unsupported
from tierload.state.dtypes import BY_DTYPE, FLOATING, ITEM_SIZES
from tierload.state.gates import GatedParameter, GatedTensor, await_tensors
from tierload.state.keys import DEPTH_MAX, ROOT, Path
from tierload.state.lazy import LazyTensor
from tierload.state.names import ParameterNames
from tierload.state.pause import paused_collection
from tierload.state.scalars import WRITERS, Unwritable, numpy_dtype
from tierload.state.sources import Blob, Described, described, texts
from tierload.state.tensors import NDIM_MAX, TORCH, TensorLeaf, is_freed, refusal
from tierload.state.texts import base64_text, quoted
from tierload.types import ChunkTable, FlatState, Sharded

__all__ = ["flatten"]

_BLOB_MIN = 4096
"""Bytes from this length on get a chunk of their own."""

_ADVICE = (
    "use tensors, numbers, text, containers of them, dataclasses, or objects with state_dict(); "
    "to pickle it, pass allow_pickle=True"
)


class Outline:
    """The chunks of a flattened state, wherever its memory was; those of another state with the same keys, dtypes and
    shapes are the same."""

    def __init__(
        self, writer: _native.StateWriter, shared: list[int], keys: list[bytes], more: list[Described]
    ) -> None:
        self._writer = writer
        self._more = shared, keys, [each.kind for each in more]
        self.order = writer.order(shared, keys)
        twice = self.order.twice
        if twice is not None:
            key = twice.decode("utf-8", "surrogatepass")
            raise UnsupportedValue(f"two tensors in the state have the key {key!r}; a dict has keys of equal text")
        kinds = [each.kind for each in more]
        self.chunks = ChunkTable(
            *writer.table(
                self.order,
                keys,
                [row.code for row, _, _, _ in kinds],
                [list(sizes) for _, sizes, _, _ in kinds],
                [nbytes for _, _, nbytes, _ in kinds],
            )
        )
        self.strides = {number: kind[3] for number, kind in zip(self.order.more, kinds, strict=True) if kind[3]}
        self.item_sizes = ITEM_SIZES[self.chunks.dtypes]
        self.floating = FLOATING[self.chunks.dtypes]

    def fits(self, writer: _native.StateWriter, shared: list[int], keys: list[bytes], more: list[Described]) -> bool:
        """Whether it is that of another state, too."""
        return self._more == (shared, keys, [each.kind for each in more]) and writer.alike(self._writer)


def flatten(state: object, *, allow_pickle: bool = False, like: object = None) -> FlatState:
    """Describe ``state``: where each tensor's bytes are, and everything else as a document.

    No tensor is copied, but for views with gaps, and those on devices that the core does not reach; the caller keeps
    the state unchanged until the bytes are written. ``like`` is the outline of an earlier state, which is taken over
    when this one has the same.

    Raises:
        UnsupportedValue: Something in the state cannot be stored; the message says where it is and what to do.
    """
    writer = _Writer(state, allow_pickle)
    try:
        with paused_collection():
            writer.write()
            return writer.flat(like if isinstance(like, Outline) else None)
    finally:
        writer.close()


class _Writer:
    """Writes the document. The native writer walks the ordinary containers and tensors; it asks ``_encode`` for others,
    which gives text and, between it, the values inside."""

    def __init__(self, state: object, allow_pickle: bool) -> None:
        self._state = state
        self._allow_pickle = allow_pickle
        self._out = _native.StateWriter(TORCH)
        self._tensors: list[TensorLeaf] = []
        self._blobs: list[Blob] = []
        self._spread: dict[int, Sharded] = {}  # by hole
        self._parts: dict[
            object, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # of spread tensors, and what is stored of each
        self._notes: list[str] = []
        self._open: set[int] = set()
        self._names: ParameterNames | None = None
        self._looked: dict[int, _native.ModuleState] = {}  # since code of the user's has last run
        own: dict[type, Callable[[Any, Path], Parts]] = {
            bytes: self._bytes,
            bytearray: self._bytes,
            np.ndarray: self._array,
            np.memmap: self._array,
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            **dict.fromkeys((GatedTensor, GatedParameter), self._arriving),
            LazyTensor: lambda lazy, path: self._tensor(lazy.materialise(), path),
            files.File: self._file,
            files.Folder: self._folder,
            rng.RNG: rng.encode,
            _Opened: self._close,
        }
        self._encoders = ENCODERS | own | dict.fromkeys(rng.GENERATORS, rng.encode)
        self._counted = COUNTED | {bytearray, np.ndarray, np.memmap, rng.RNG, *rng.GENERATORS}

    def write(self) -> None:
        """Write the whole document, with holes for the numbers of chunks."""
        self._out.append('{"version":1,"root":')
        self._out.write(self._state, ROOT, self._encode)
        self._out.append("}")

    def close(self) -> None:
        """End the circle of the writer and its methods, in which the state would live until the next collection."""
        self._encoders.clear()
        self._looked.clear()

    def _encode(self, value: Any, path: Path) -> Parts:
        """The parts of a value that the native writer does not know."""
        kind = type(value)
        try:
            write = WRITERS.get(kind)
            if write is not None:
                return [write(value)]
            encode = self._encoders.get(kind)
            counted = kind in self._counted
            if encode is None:
                encode, counted = self._other(value, path)
            if counted:
                reference = self._met(value)
                if reference:
                    return [reference]
            if path.depth > DEPTH_MAX:
                raise Unwritable(f"the state nests deeper than {DEPTH_MAX} levels here")
            parts = encode(value, path)
            if kind is not _Opened and id(value) not in self._looked:
                self._looked.clear()
            return parts
        except Unwritable as error:
            raise unsupported(value, path, str(error)) from error

    def flat(self, like: Outline | None) -> FlatState:
        """Number the chunks, fill the holes, and hand everything over."""
        notes: list[str] = []
        out = self._out
        shared = out.shared([leaf.range for leaf in self._tensors if leaf.is_within_reach and leaf.nbytes])
        leaves = [*self._tensors, *(TensorLeaf(*out.leaf(number)) for number in shared)]
        leaves.sort(key=attrgetter("hole"))
        rows: list[Chunk | TensorLeaf | Blob] = [*chunks_of(leaves, notes), *self._blobs]
        # They come in the order of addresses, which says nothing about the state.
        rows.sort(key=attrgetter("key"))
        self._notes += sorted(notes)
        keys = [row.key.encode("utf-8", "surrogatepass") for row in rows]
        more = [described(row) for row in rows]
        outline = like if like and like.fits(out, shared, keys, more) else Outline(out, shared, keys, more)
        numbered = sorted(zip(outline.order.more, rows, strict=True), key=itemgetter(0))
        return FlatState(
            chunks=outline.chunks,
            pointers=out.pointers(outline.order, [each.pointer for each in more]),
            devices=out.devices(outline.order, [each.device for each in more]),
            strides=outline.strides,
            item_sizes=outline.item_sizes,
            floating=outline.floating,
            document=out.document(outline.order, texts(numbered)),
            owners=(out.release(), [each.owner for each in more]),
            notes=tuple(self._notes),
            outline=outline,
            sharded=self._sharded(numbered) if self._spread else {},
        )

    def _sharded(self, numbered: list[tuple[int, Chunk | TensorLeaf | Blob]]) -> dict[int, Sharded]:
        """What the chunks are parts of that hold the local part of a spread tensor."""
        found: dict[int, Sharded] = {}
        for number, row in numbered:
            leaves = [row] if isinstance(row, TensorLeaf) else [view.leaf for view in getattr(row, "views", ())]
            wholes = {self._spread.get(leaf.hole) for leaf in leaves}
            if wholes <= {None}:
                continue
            whole = wholes.pop()
            if wholes or whole is None or not all(_is_all_of(leaf, leaves[0]) for leaf in leaves):
                keys = ", ".join(sorted(leaf.key for leaf in leaves)[:4])
                raise UnsupportedValue(
                    f"{keys} share memory, and one of them is a part of a tensor that is spread over ranks: clone it"
                )
            found[number] = whole
        return found

    def _met(self, value: object) -> str:
        """Count a value whose identity is kept; the reference to it when it has been met before, else no text."""
        number = self._out.met(value)
        if number < 0:
            return ""
        if id(value) in self._open:
            raise Unwritable("its own state refers to it")
        return f'{{"ref":{number}}}'

    def _other(self, value: object, path: Path) -> tuple[Callable[[Any, Path], Parts], bool]:
        """How a value of no built-in type is written, and whether references count it."""
        if sharding.is_spread(value):
            return self._spread_tensor, False
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

    def _hole(self, text: str) -> int:
        """Write ``text`` and leave a place for what is known only when the chunks are numbered."""
        self._out.append(text)
        return self._out.hole()

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Parts:
        if is_compound(tensor):
            return self._compound(tensor, path)
        if tensor.dtype not in BY_DTYPE or tensor.is_meta or tensor.dim() > NDIM_MAX or is_freed(tensor):
            raise refusal(tensor, path)
        self._tensors.append(TensorLeaf(tensor, path.text(), self._hole('{"t":')))
        return ["}"]

    def _arriving(self, tensor: torch.Tensor, path: Path) -> Parts:
        await_tensors((tensor,))
        return self._tensor(tensor, path)

    def _spread_tensor(self, tensor: Any, path: Path) -> Parts:
        """This rank's part of a tensor; what it is a part of is told beside the document."""
        whole, local = sharding.sharded(tensor, path), sharding.local_part(tensor, path)
        if local.dtype not in BY_DTYPE or local.is_meta or local.dim() > NDIM_MAX or is_freed(local):
            raise refusal(local, path)
        leaf = TensorLeaf(self._once(local), path.text(), self._hole('{"t":'))
        if isinstance(tensor, torch.nn.Parameter):
            leaf.marks += ',"kind":"parameter"'
        if tensor.requires_grad:
            leaf.marks += ',"grad":true'
        self._spread[leaf.hole] = whole
        self._tensors.append(leaf)
        return ["}"]

    def _once(self, local: torch.Tensor) -> torch.Tensor:
        """The same contiguous tensor for all parts over one memory: what is tied is so on every rank, also on one whose
        part is empty (it has no address) or has to be copied."""
        memory = local.untyped_storage()._cdata, local.storage_offset()
        place = memory, local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg()
        if place not in self._parts:
            whole = TensorLeaf(local, "", 0).contiguous
            self._parts[place] = local, local if whole else local.clone(memory_format=torch.contiguous_format)
        return self._parts[place][1]

    def _compound(self, tensor: torch.Tensor, path: Path) -> Parts:
        reference = self._met(tensor)
        return [reference] if reference else self._opened(tensor, compound_writing.encode(tensor, path))

    def _blob(self, path: Path, data: np.ndarray[Any, np.dtype[np.uint8]], text: str) -> None:
        self._blobs.append(Blob(path.text(), self._hole(text), data))

    def _bytes(self, value: bytes | bytearray, path: Path) -> Parts:
        kind = type(value).__name__
        if len(value) < _BLOB_MIN:
            return [f'{{"{kind}":"{base64_text(value)}"}}']
        if kind == "bytes":  # a bytearray has been counted already
            self._out.count()
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
        if not isinstance(value, torch.nn.Module):
            return self._opened(value, modules.encode(value, path))
        known = modules.known_state(value, path)
        if known is not None:
            self._looked[id(value)] = known
        return self._opened(value, modules.encode_module(value, path, known, self._notes))

    def _optimizer(self, value: torch.optim.Optimizer, path: Path) -> Parts:
        if self._names is None:
            self._names = ParameterNames(self._state, self._looked)
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
            self._out.append("".join(str(part) for part in self._entry(inner, path.child(name))))
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


def _is_all_of(leaf: TensorLeaf, first: TensorLeaf) -> bool:
    return leaf.shape == first.shape and leaf.start == first.start and (leaf.contiguous or not leaf.nbytes)


_NOTHING = np.empty(0, np.uint8)
