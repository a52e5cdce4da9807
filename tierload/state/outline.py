"""A state without its bytes: containers as they are, tensors on the meta device, and marks for what has to be read.

From it a load is planned of whatever parts of it are wanted: boxes of tensors, or values as a load gives them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from operator import gt
from typing import Any

import torch

from tierload.errors import KeyMismatch
from tierload.state.decoders import read_optimizer
from tierload.state.dtypes import BY_DTYPE
from tierload.state.keys import Path, unescaped
from tierload.state.memory import Memory
from tierload.state.nodes import SCALARS, fields_of, tag_of
from tierload.state.pause import paused_collection
from tierload.state.plan import LoadPlan
from tierload.state.reader import PENDING, Decoding, Reader
from tierload.state.spread_binding import copy_into
from tierload.state.tensors import device_of, is_within_reach
from tierload.state.views import TensorView
from tierload.types import Box, BoxDestination, ChunkTable

__all__ = ["NoMemory", "Outline", "Unread", "Wanted"]

Wanted = tuple[torch.Tensor, Box, torch.Tensor]
"""A tensor of an outline, a box of it, and the tensor of the box's sizes that it is read into."""

_CONTAINERS = frozenset(("list", "d", "map", "odict", "statedict", "ddict", "counter", "object"))
_STAGED_BYTES = 256 << 20  # of boxes that cannot be read right into their targets: as much as is held at a time


class Unread:
    """Stands in an outline for a value that is no tensor and no dict or list, and has to be read to be known."""

    __slots__ = ("node", "path")

    def __init__(self, node: object, path: Path) -> None:
        self.node = node
        self.path = path

    def __repr__(self) -> str:
        return f"<{self.path.text()}, not read>"


class NoMemory(Memory):
    """Memory that is never made: every value of a container is asked for by itself."""

    def fill_dict(self, nodes: dict[str, Any], into: dict[str, Any]) -> list[tuple[str, object]]:
        """All that is no scalar is left to the caller."""
        into.update(nodes)
        return [(key, node) for key, node in nodes.items() if type(node) not in SCALARS]

    def fill_list(self, nodes: list[Any], into: list[Any]) -> list[tuple[int, object]]:
        """The same for a list."""
        into.extend(nodes)
        return [(index, node) for index, node in enumerate(nodes) if type(node) not in SCALARS]

    def fill_pairs(self, pairs: list[Any], into: Any) -> list[tuple[Any, object]] | None:
        """Everything is left to the caller."""
        return None


class Outline(Reader):
    """``state`` is what a load would give, of dicts and lists, tensors on meta, plain values, and ``Unread`` for the
    rest. Optimizers have their states by the names that parameters have in their module, where all have one.

    Raises:
        CorruptStore: The document contradicts itself or the chunks.
        UnsupportedValue: It has a dtype that this torch lacks.
    """

    def __init__(
        self, document: bytes, chunks: ChunkTable, *, types: Sequence[type] = (), allow_pickle: bool = False
    ) -> None:
        super().__init__(document, chunks, types=types, allow_pickle=allow_pickle)
        self._stored: dict[int, tuple[TensorView, Path, torch.Tensor]] = {}  # by the identity of the one on meta
        self._outlining = True
        self.memory = self._rows = NoMemory(chunks)  # it goes on to know the chunks that it has checked
        with paused_collection():
            self.state: Any = self.whole()
        self._outlining = False

    def compare(self, wanted: Sequence[Wanted], *, cast: bool) -> None:
        """That every box is one of its tensor and has the sizes of its target, which has the dtype too, or with
        ``cast`` another floating one.

        Raises:
            KeyMismatch: What differs, all of it.
        """
        shapes: dict[str, str] = {}
        dtypes: dict[str, str] = {}
        castable = True
        for stored, box, target in wanted:
            view, path, _ = self._stored[id(stored)]
            own = BY_DTYPE.get(target.dtype)
            ends = [begin + size for begin, size in zip(*box, strict=True)]
            if len(ends) != len(view.shape) or min((*box.offsets, *box.sizes, 0)) < 0 or any(map(gt, ends, view.shape)):
                shapes[path.text()] = (
                    f"{path.text()!r} of shape {view.shape} has no box of {box.sizes} at {box.offsets}"
                )
            elif tuple(target.shape) != box.sizes:
                shapes[path.text()] = f"{path.text()!r}: a part of shape {tuple(target.shape)} for one of {box.sizes}"
            if own is not view.row:
                fits = own is not None and own.castable and view.row.castable
                if not (cast and fits):
                    castable = castable and fits
                    text = f"{path.text()!r} is {target.dtype} in the target and {view.row.torch} in the store"
                    dtypes[path.text()] = text
        if shapes or dtypes:
            advice = "; cast=True converts between float dtypes" if dtypes and castable and not cast else ""
            what = "; ".join([*shapes.values(), *dtypes.values()])
            raise KeyMismatch(f"nothing was read: {what}{advice}", shapes=tuple(shapes), dtypes=tuple(dtypes))

    def plan_boxes(self, wanted: Sequence[Wanted]) -> Iterator[LoadPlan]:
        """Loads that together read all that is ``wanted``; one is to be finished before the next is asked for."""
        plan = _Boxes(self._rows)
        for stored, box, target in wanted:
            view, path, _ = self._stored[id(stored)]
            plan.add(view, path, box, target)
            if plan.staged >= _STAGED_BYTES:
                yield plan.made()
                plan = _Boxes(self._rows)
        yield plan.made()

    def plan_values(self, unread: Sequence[Unread]) -> LoadPlan:
        """A load of values, in their order, as a list."""
        self.restart()
        with paused_collection():
            values = [self.value(one.node, one.path) for one in unread]

        def finish() -> object:
            self.arrived()
            return [self.value(one.node, one.path) for one in unread] if self.late else values

        return LoadPlan(self.memory.chunks, self.memory.destinations(), (), self.users, finish)

    def _step(self, node: object, path: Path, stack: list[Decoding]) -> object:
        if not self._outlining or type(node) in SCALARS:
            return super()._step(node, path, stack)
        tag, content = tag_of(node)
        if tag == "ref":
            tag, content = tag_of(self.target(content))
        if tag == "t":
            return self._outlined(content, path)
        if tag == "object" and type(content) is dict and "optimizer" in content:
            stack.append(_by_name(self, content, path))
            return PENDING
        return super()._step(node, path, stack) if tag in _CONTAINERS else Unread(node, path)

    def _outlined(self, content: object, path: Path) -> torch.Tensor:
        view = self.view(content, path)
        tensor = torch.empty_strided(view.shape, view.stride, dtype=view.row.torch, device="meta")
        self._stored[id(tensor)] = view, path, tensor
        return tensor


class _Boxes:
    """A load of boxes in the making. ``staged`` are the bytes that are read into memory of its own."""

    def __init__(self, rows: Memory) -> None:
        self.staged = 0
        self._rows = rows
        self._memory = Memory(rows.chunks)
        self._parts: list[BoxDestination] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._in_place: set[int] = set()
        self._users: defaultdict[int, list[Path]] = defaultdict(list)

    def add(self, view: TensorView, path: Path, box: Box, target: torch.Tensor) -> None:
        """One more: read directly where its elements are those of the store, else from a copy."""
        chunk, _ = self._rows.row(view.chunk)
        self._users[view.chunk].append(path)
        if 0 in box.sizes:
            return
        if not (view.whole and view.shape == chunk.sizes):  # a view of something, all of which is read
            if not self._memory.has_tensor(view.chunk):
                self.staged += chunk.nbytes
            whole = view.data(self._memory)
            slices = [slice(begin, begin + size) for begin, size in zip(*box, strict=True)]
            self._copies.append((target, whole[tuple(slices)]))
            return
        marked = view.conj or view.neg or target.is_conj() or target.is_neg()
        spread_out = all(stride or size == 1 for stride, size in zip(target.stride(), target.shape, strict=True))
        part = target
        if not is_within_reach(target) or target.dtype is not view.row.torch or marked or not spread_out:
            part = torch.empty(box.sizes, dtype=view.row.torch, device="cpu")
            self.staged += part.nbytes
            self._copies.append((target, view.marked(part)))
        else:
            self._in_place.add(view.chunk)
        size = part.element_size()
        strides = tuple(step * size for step in part.stride())
        at, device = part.data_ptr(), device_of(part)
        self._parts.append(BoxDestination(view.chunk, box, at, strides, size, part, device))

    def made(self) -> LoadPlan:
        """What was added."""

        def finish() -> None:
            for target, source in self._copies:
                copy_into(target, source)

        destinations = self._memory.destinations(parts=self._parts)
        return LoadPlan(self._memory.chunks, destinations, self._in_place, self._users, finish)


def _by_name(reader: Reader, content: object, path: Path) -> Generator[tuple[object, Path], object, object]:
    """An optimizer in the form of torch's ``state_dict()``, but with names in the place of positions."""
    _, optimizer = fields_of(content, "type", "optimizer")
    whole: Any = yield from read_optimizer(reader, optimizer, path)
    names = _inner_names(whole.pop("names"))
    if len(set(names)) == len(names) and None not in names:
        by_name = dict(enumerate(names))
        whole["state"] = {by_name.get(key, key): state for key, state in whole["state"].items()}
        for group in whole["param_groups"]:
            group["params"] = [by_name[position] for position in group["params"]]
    return whole


def _inner_names(keys: Sequence[str | None]) -> list[str | None]:
    """What parameters are called in their modules, by the keys that they have in the state."""
    return [None if key is None else unescaped(key.rpartition("/")[2]) for key in keys]
