"""A state whose tensors are read when they are used: what a load gives, with a ``LazyTensor`` for each plain tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, Self

import numpy as np
import torch

from tierload.state.dtypes import BY_CODE
from tierload.state.footprints import contiguous_strides
from tierload.state.keys import KeyFilter, Path
from tierload.state.lazy_index import Cutout, cutout_of
from tierload.state.nodes import DROPPED, tag_of
from tierload.state.outline import NoMemory
from tierload.state.pause import paused_collection
from tierload.state.plan import LoadPlan, refuse_unused
from tierload.state.reader import Decoding, Reader
from tierload.state.spread_binding import copy_into
from tierload.state.views import TensorView
from tierload.types import Box, BoxDestination, ChunkTable, Destinations

__all__ = ["LazyTensor", "Pages", "plan_lazy"]

_NO_CHUNKS, _NO_POINTERS = np.empty(0, np.int64), np.empty(0, np.uint64)


class Pages(Protocol):
    """The pages of one commit, which can be read as long as this is known."""

    chunks: ChunkTable

    def read(self, plan: LoadPlan) -> None:
        """Fills every destination of a plan.

        Raises:
            CorruptPage: A page is damaged.
        """


class _Chunk:
    """A chunk, for all the tensors that share its memory. It has locks of no kind: of two threads that read it at the
    same time, the first one's memory counts, and a fork finds nothing locked."""

    def __init__(self, pages: Pages, number: int) -> None:
        self.info = pages.chunks.info(number)
        self._pages = pages

    @property
    def is_read(self) -> bool:
        """Whether its memory is there."""
        return "_memory" in vars(self)

    def memory(self, key: str) -> torch.Tensor:
        """Its bytes, in the memory that all share; ``key`` is whose use of it is told when a page is damaged."""
        known: torch.Tensor | None = vars(self).get("_memory")
        if known is None:
            known = vars(self).setdefault("_memory", self.read(key))
        return known

    def read(self, key: str) -> torch.Tensor:
        """Its bytes, in new memory."""
        memory = torch.empty(self.info.nbytes, dtype=torch.uint8, device="cpu")
        if self.info.nbytes:
            numbers, pointers = np.array([self.info.number]), np.array([memory.data_ptr()], np.uint64)
            self._fill(Destinations(numbers, pointers, memory), key)
        return memory

    def cut(self, cutout: Cutout, order: Sequence[int], dtype: torch.dtype, key: str) -> torch.Tensor:
        """Boxes of a tensor, in new memory; ``order`` are its dimensions as the chunk has them."""
        laid = torch.empty([cutout.sizes[dim] for dim in order], dtype=dtype, device="cpu")
        target = laid.permute([order.index(dim) for dim in range(len(order))])
        size = target.element_size()
        strides = tuple(step * size for step in laid.stride())
        parts, pointer = [], target.data_ptr()
        for box in cutout.boxes:
            if 0 not in box.sizes:
                turned = Box(*(tuple(numbers[dim] for dim in order) for numbers in box))
                parts.append(BoxDestination(self.info.number, turned, pointer, strides, size, target))
                pointer += box.sizes[0] * target.stride(0) * size if order else 0
        if parts:
            self._fill(Destinations(_NO_CHUNKS, _NO_POINTERS, (), parts), key)
        return target

    def _fill(self, destinations: Destinations, key: str) -> None:
        users = {self.info.number: [Path.of_text(key)]}
        self._pages.read(LoadPlan(self._pages.chunks, destinations, (), users, lambda: None))


class _Stored:
    """A tensor that has not been read."""

    def __init__(self, chunk: _Chunk, view: TensorView, key: str) -> None:
        self.chunk = chunk
        self.view = view
        self.key = key

    def whole(self) -> torch.Tensor:
        """The tensor as it was saved, over the memory of its chunk."""
        return self.view.as_saved(self.view.over(self.chunk.memory(self.key)))

    def part(self, cutout: Cutout) -> torch.Tensor:
        """Boxes of it, of the pages that hold them; where it is not all of its chunk, of all the chunk's."""
        view, order = self.view, self._order()
        if order is not None:
            return view.marked(self.chunk.cut(cutout, order, view.row.torch, self.key))
        whole = view.over(self.chunk.read(self.key))
        target, at = torch.empty(cutout.sizes, dtype=view.row.torch, device="cpu"), 0
        for offsets, sizes in cutout.boxes:
            slices = [slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
            part = target[at : at + sizes[0]] if sizes else target
            copy_into(part, whole[tuple(slices)])
            at += sizes[0] if sizes else 0
        return target

    def _order(self) -> list[int] | None:
        """Its dimensions in the order in which the chunk has them, where it is the chunk but for their order."""
        view, info = self.view, self.chunk.info
        order = sorted(range(len(view.shape)), key=lambda dim: -view.stride[dim])
        plain = contiguous_strides(info.sizes)
        alike = (
            BY_CODE[info.dtype] == view.row and not view.offset and tuple(view.shape[d] for d in order) == info.sizes
        )
        steps = zip((view.stride[dim] for dim in order), plain, info.sizes, strict=True) if alike else ()
        return order if alike and all(step == own or size == 1 for step, own, size in steps) else None


class LazyTensor(torch.Tensor):
    """A stored tensor that is read when it is used. Shape, dtype and the like are known without; an index reads the
    pages that it needs, into a tensor of its own; everything else reads the whole, once, and goes on with that.

    Raises:
        CorruptPage: At the use that needs the page.
    """

    _stored: _Stored | None

    @staticmethod
    def __new__(cls: type[Self], stored: _Stored) -> Self:
        """One for a tensor that has not been read."""
        view = stored.view
        cpu = torch.device("cpu")
        lazy: Self = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, strides=view.stride, dtype=view.row.torch, device=cpu, requires_grad=view.grad
        )
        lazy._stored = stored
        return lazy

    def materialise(self) -> torch.Tensor:
        """The tensor that ``load`` gives, always the same one; it shares its memory as it did when it was saved."""
        stored = self._stored  # before the other: who sets this to None has set that one
        made: torch.Tensor | None = vars(self).get("_made")
        if made is None:
            assert stored is not None
            made = vars(self).setdefault("_made", stored.whole())
            self._stored = None  # the commit is held for what has not been read
        return made

    def __getitem__(self, index: Any) -> torch.Tensor:
        index, stored = _plain(index), self._stored
        cutout = None if stored is None or stored.chunk.is_read else cutout_of(index, self.shape)
        if stored is None or cutout is None:
            return self.materialise()[index]
        return stored.part(cutout)[cutout.index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACTS and isinstance(args[0], LazyTensor) and args[0]._stored is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What torch's own code does to a tensor without asking __torch_function__.
        return func(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.materialise(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its values: a pickle does not lean on a store.
        return self.materialise().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stored = self._stored
        if stored is None:
            return repr(self.materialise())
        return f"LazyTensor({stored.key!r}, shape={tuple(self.shape)}, dtype={self.dtype}, not read)"


_FACTS = frozenset(
    [
        *(getattr(torch.Tensor, name) for name in "dim ndimension size stride numel nelement element_size".split()),
        *(getattr(torch.Tensor, name) for name in "__len__ is_contiguous is_floating_point is_complex".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "shape dtype device layout ndim itemsize nbytes".split()),
        *(getattr(torch.Tensor, name).__get__ for name in "is_cpu is_cuda is_meta is_sparse is_quantized".split()),
        torch.Tensor.is_nested.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)
"""What is known of a tensor that has not been read."""


def _plain(value: Any) -> Any:
    """An argument of a function, with ordinary tensors in the place of lazy ones."""
    if isinstance(value, LazyTensor):
        return value.materialise()
    if type(value) not in (list, tuple):
        return value
    plain = [_plain(one) for one in value]
    changed = any(one is not other for one, other in zip(plain, value, strict=True))
    return type(value)(plain) if changed else value


def _sent(lazy: LazyTensor) -> Any:
    """How one goes to another process of multiprocessing: what has not been read is read over there."""
    stored = lazy._stored
    return (_itself, (lazy.materialise(),)) if stored is None else (LazyTensor, (stored,))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


ForkingPickler.register(LazyTensor, _sent)


class _LazyReader(Reader):
    """Decodes a document with lazy tensors; those that random states and compound tensors are made of are read."""

    def __init__(self, document: bytes, pages: Pages, keys: KeyFilter | None, **options: Any) -> None:
        super().__init__(document, pages.chunks, keys=keys, **options)
        self.memory = NoMemory(pages.chunks)  # what is read is asked for value by value
        self._pages = pages
        self._shared: dict[int, _Chunk] = {}
        self._same: dict[TensorView, LazyTensor] = {}
        self._inside = 0

    def opened(self, node: object, is_open: bool) -> None:
        """Between these two calls tensors are parts of a value."""
        super().opened(node, is_open)
        if tag_of(node)[0] in ("compound", "rng"):
            self._inside += 1 if is_open else -1

    def _step(self, node: object, path: Path, stack: list[Decoding]) -> object:
        if self._inside or type(node) is not dict or "t" not in node:
            return super()._step(node, path, stack)
        if not self.wants(path):
            return DROPPED
        _, content = tag_of(node)
        return self.once(content, lambda: self._lazy(content, path))

    def _lazy(self, content: Any, path: Path) -> LazyTensor:
        view = self.view(content, path)
        known = self._same.get(view) if view.tied else None
        if known is None:
            if view.chunk not in self._shared:
                self._shared[view.chunk] = _Chunk(self._pages, view.chunk)
            known = LazyTensor(_Stored(self._shared[view.chunk], view, path.text()))
            if view.tied:
                self._same[view] = known
        return known


def plan_lazy(
    document: bytes, pages: Pages, *, keys: Sequence[str] | None, types: Sequence[type], allow_pickle: bool
) -> LoadPlan:
    """Plan to load a state as ``plan_load`` does, but for its plain tensors, which are lazy ones that read from
    ``pages`` when they are used.

    Raises:
        CorruptStore, UnsupportedValue, KeyMismatch: As there.
    """
    wanted = None if keys is None else KeyFilter(keys)
    with paused_collection():
        reader = _LazyReader(document, pages, wanted, types=types, allow_pickle=allow_pickle)
        state = reader.whole()
    refuse_unused(wanted)

    def finish() -> object:
        reader.arrived()
        with paused_collection():
            return reader.whole() if reader.late else state

    return LoadPlan(reader.memory.chunks, reader.memory.destinations(), (), reader.users, finish)
