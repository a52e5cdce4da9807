"""Loading into a target: the stored document and the live objects, walked side by side before anything is changed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierload.errors import CorruptStore
from tierload.state import (
    compound_binding,
    container_binding,
    files,
    leaf_binding,
    module_binding,
    optimizer_binding,
    rng,
    spread_binding,
)
from tierload.state.compounds import is_compound
from tierload.state.cut_states import Cuts
from tierload.state.documents import WholeState
from tierload.state.dtypes import BY_DTYPE
from tierload.state.fills import Fill, obstacle
from tierload.state.gates import Lost
from tierload.state.keys import DEPTH_MAX, ROOT, KeyFilter, Path
from tierload.state.members import entries, members, nodes_of, optimizer_node
from tierload.state.modules import is_stateful
from tierload.state.names import ParameterNames
from tierload.state.nodes import tag_of
from tierload.state.pause import paused_collection
from tierload.state.plan import LoadPlan, refuse_unused
from tierload.state.problems import Problems
from tierload.state.reader import Reader
from tierload.state.settled import Settled
from tierload.state.sharding import is_spread, ranks_of
from tierload.state.stored_shapes import StoredShapes
from tierload.state.targets import Put, is_filled, is_mutable, is_sequence, refill
from tierload.state.tensors import is_freed, is_plain_tensor, refusal
from tierload.state.views import TensorView
from tierload.types import ChunkTable, PartDestination

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["Binder", "plan_bind"]


def plan_bind(
    document: bytes,
    chunks: ChunkTable,
    into: object,
    *,
    strict: bool = True,
    cast: bool = False,
    keys: Sequence[str] | None = None,
    types: Sequence[type] = (),
    allow_pickle: bool = False,
    holders: set[tuple[int, ...]] | None = None,
    whole: WholeState | None = None,
) -> LoadPlan:
    """Plan to load a state into ``into``: a module, an optimizer, or a container of such objects, tensors and values.

    Tensors are filled in place, plain values are replaced in their dict or list; an empty dict or list and None take
    whatever is stored there. With ``strict=False`` what matches is loaded, and the report that ``finish`` gives says
    what did not. ``cast`` allows conversion between float16, bfloat16, float32 and float64. ``whole`` is what the
    document and the chunks are of, where several ranks have saved them.

    Raises:
        KeyMismatch: Store and target differ and ``strict`` is true; all differences are listed, nothing has changed.
        CorruptStore: The document contradicts itself or the chunks.
        UnsupportedValue: A pickle without ``allow_pickle``, or a tensor in the target that cannot be filled.
    """
    wanted = None if keys is None else KeyFilter(keys)
    with paused_collection():
        reader = Reader(document, chunks, types=types, allow_pickle=allow_pickle, keys=wanted)
        binder = Binder(reader, into, strict=strict, cast=cast, whole=whole)
        try:
            binder.walk()
            plan = binder.plan()
            refuse_unused(wanted)
        except BaseException:
            binder.lost.shut()
            raise
        finally:
            if holders is not None:
                holders.update(ranks_of(mesh) for mesh in binder.meshes.values())
    return plan


class Binder:
    """One load into a target. ``walk`` only looks; the plan's ``finish`` acts, in the order that is written there."""

    def __init__(
        self, reader: Reader, into: object, *, strict: bool, cast: bool, whole: WholeState | None = None
    ) -> None:
        self.reader = reader
        self.strict = strict
        self.cuts = Cuts(whole)
        self.shapes = StoredShapes(reader)
        self.problems = Problems()
        self.loaded: list[Path] = []
        self.materials: list[Fill] = []  # tensors on meta, which are given memory
        self.spread_materials: dict[int, tuple[DTensor, torch.Tensor, int]] = {}  # by identity: the part, and its chunk
        self.actions: list[Callable[[], None]] = []
        self.last: list[Callable[[], None]] = []  # random generators, which the actions may use
        self.parts: list[PartDestination] = []  # of tensors that are spread over ranks
        self.meshes: dict[int, DeviceMesh] = {}  # over which they are, by identity
        self.touched: list[torch.Tensor] = []  # memory of theirs that is filled directly
        self.made: dict[int, torch.Tensor] = {}  # by identity: filled like the target's own, which has them at the end
        self.followed: list[torch.Tensor] = []  # parameters to whose devices states are moved when they are there
        self.modules: list[torch.nn.Module] = []
        self.fills: list[Fill] = []
        self.lost = Lost()
        self.converted: list[str] = []
        self._into = into
        self._cast = cast
        self._seen: set[tuple[int, int]] = set()
        self._queue: collections.deque[tuple[Any, object, Path, Put | None]] = collections.deque()
        self._names: ParameterNames | None = None

    @property
    def names(self) -> ParameterNames:
        """What the parameters in the target are called."""
        if self._names is None:
            self._names = ParameterNames(self._into)
        return self._names

    def walk(self, parts: Iterable[tuple[object, object, Path]] | None = None) -> None:
        """Compare the whole target with the whole document, or ``parts`` of both: live objects, and nodes with their
        places."""
        self.reader.check()
        for live, node, path in [(self._into, self.reader.root, ROOT)] if parts is None else parts:
            self.push(live, node, path, None)
        while self._queue:
            self._bind(*self._queue.popleft())

    def plan(self) -> LoadPlan:
        """The plan of the load.

        Raises:
            KeyMismatch: Something differs, and the load is strict.
        """
        settled = Settled(self)
        if self.strict:
            self.problems.refuse()
        return settled.plan()

    def bind_alike(
        self, live: Mapping[Any, Any], tag: str, content: Any, path: Path
    ) -> tuple[dict[Any, tuple[Path, object]], list[Any]]:
        """Bind the tensors of a mapping whose stored ones are the same in all but their bytes, as most are, and are
        wanted: place and node of what is stored beside them, and the keys of the others in ``live``."""
        rest = list(live)
        bound: set[Any] = set()
        one = next(iter(live.values()), None)
        # As a rule a module is on meta as a whole. The native core would be refused each tensor by an error of torch's,
        # which takes a millisecond.
        on_meta = isinstance(one, torch.Tensor) and one.is_meta
        nodes = nodes_of(tag, content) if self.reader.keys is None and not on_meta else None
        if nodes is not None:
            rest = self.reader.memory.bind(live, nodes)
            if len(rest) + len(nodes) == len(live):
                return {}, rest
            bound = live.keys() - set(rest)
        stored = entries(self.reader, tag, content, path)
        return {key: (place, node) for key, place, node in stored if key not in bound}, rest

    def push(self, live: object, node: object, path: Path, put: Put | None) -> None:
        """Bind these two as well, later."""
        self._queue.append((live, node, path, put))

    def leaves(self, node: object, path: Path) -> list[Path]:
        """The places of everything in a node that holds nothing else, as far as the load wants it."""
        found: list[Path] = []
        stack = [(path, node)]
        while stack:
            place, inner = stack.pop()
            if place.depth > DEPTH_MAX:
                raise CorruptStore(f"the state document nests deeper than {DEPTH_MAX} levels")
            tag, content = tag_of(inner)
            if tag == "object" and "optimizer" in content:
                parts = optimizer_node(self.reader, content["optimizer"], place)
                below = [(spot, state) for _, state, spot in parts.states]
                if self.reader.wants(parts.groups[1]):
                    found.append(parts.groups[1])
            else:
                below = [] if tag in ("", "rng", "enum", "compound") else members(self.reader, tag, content, place)
            if below:
                stack.extend(below)
            elif self.reader.wants(place):
                found.append(place)
        return found

    def mismatch(self, what: str, node: object, path: Path) -> None:
        """Report that the store has another kind of value than the target, if the load wants it."""
        if self.wants_any(node, path):
            kind = container_binding.kind_of_node(node, path)
            self.problems.dtypes(path, f"is {what} in the target and {kind} in the store")

    def wants_any(self, node: object, path: Path) -> bool:
        """Whether the load wants a value or anything inside it."""
        return self.reader.keys is None or bool(self.leaves(node, path))

    def matching_view(self, live: torch.Tensor, node: object, path: Path) -> TensorView | None:
        """The stored tensor that can fill ``live``; None when it cannot, which is reported."""
        tag, content = tag_of(node)
        if tag != "t":
            self.mismatch("a tensor", node, path)
            return None
        if (not is_plain_tensor(live) and not isinstance(live, torch.nn.Parameter)) or is_freed(live):
            raise refusal(live, path)
        view = self.reader.view(content, path)
        if tuple(live.shape) != view.shape:
            self.problems.shapes(path, f"has shape {tuple(live.shape)} in the target and {view.shape} in the store")
        elif not (why := obstacle(live, view)):
            return view if self.same_dtype(live, view, path) else None
        else:
            self.problems.shapes(path, why)
        return None

    def same_dtype(self, live: torch.Tensor, view: TensorView, path: Path) -> bool:
        """Whether what is stored has the dtype of ``live``, or may be converted to it; if not, that is reported."""
        own, stored = BY_DTYPE.get(live.dtype), view.row
        if live.dtype is stored.torch:
            return True
        castable = own is not None and own.castable and stored.castable
        if castable and self._cast:
            self.converted.append(path.text())
            return True
        self.problems.dtypes(path, f"is {live.dtype} in the target and {stored.torch} in the store")
        if castable:
            self.problems.advise("cast=True converts between float dtypes.")
        return False

    def tensor(self, live: torch.Tensor, node: object, path: Path, put: Put | None, *, module: bool = False) -> None:
        """Fill one tensor; on meta it gets memory when it is part of a module, and is replaced in a container."""
        self.lost.await_tensor(live)
        if is_spread(live):
            spread_binding.bind_spread(self, live, node, path, module=module)
            return
        if is_compound(live):
            compound_binding.bind_compound(self, live, node, path, put)
            return
        if not self.reader.wants(path):
            return
        view = self.matching_view(live, node, path)
        if view is None:
            return
        if not live.is_meta:
            self.fills.append(Fill(live, view, path))
        elif module:
            self.materials.append(Fill(live, view, path))
        elif put is None:
            self.problems.missing(path, "is on the meta device in the target, inside something immutable")
            return
        else:
            self.plain(node, path, put)
            return
        self.loaded.append(path)

    def fill(self, fill: Fill) -> None:
        """Fill one tensor of the target."""
        self.fills.append(fill)

    def fill_if_alike(self, live: torch.Tensor, node: object, path: Path) -> bool:
        """Fill ``live`` when the store has a tensor of its shape and dtype for it; whether it has."""
        self.lost.await_tensor(live)
        tag, content = tag_of(node)
        if is_spread(live):
            return spread_binding.fill_if_alike(self, live, node, path)
        if is_compound(live):
            return compound_binding.fill_if_alike(self, live, node, path)
        if tag != "t" or live.is_meta or not is_plain_tensor(live):
            return False
        view = self.reader.view(content, path)
        if tuple(live.shape) != view.shape or live.dtype is not view.row.torch or obstacle(live, view):
            return False
        self.fills.append(Fill(live, view, path))
        self.loaded.append(path)
        return True

    def plain(self, node: object, path: Path, put: Put | None) -> None:
        """Replace a live value by the stored one; inside a tuple there is no way to."""
        if not self.reader.wants(path):
            return
        self.reader.unfiltered(node, path)  # checks it, and makes the memory that it needs
        if put is None:
            self.reader.note(f"{path.shown()} stands in something immutable in the target and was left as it is")
            return
        self.actions.append(lambda: put(self.reader.unfiltered(node, path)))
        self.loaded.append(path)

    def _bind(self, live: Any, node: object, path: Path, put: Put | None) -> None:
        if path.depth > DEPTH_MAX:
            raise CorruptStore(f"the state document nests deeper than {DEPTH_MAX} levels")
        tag, content = tag_of(node)
        if tag == "ref":
            node = self.reader.target(content)
        if not isinstance(live, (torch.Tensor, int, float, str, type(None))):
            if (id(live), id(node)) in self._seen:
                return
            self._seen.add((id(live), id(node)))
        if isinstance(live, torch.Tensor):
            self.tensor(live, node, path, put)
        elif isinstance(live, torch.optim.Optimizer):
            optimizer_binding.bind_optimizer(self, live, node, path)
        elif isinstance(live, torch.nn.Module):
            self.modules.append(live)
            module_binding.bind_module(self, live, node, path)
        elif rng.kind_of(live) is not None:
            leaf_binding.bind_generator(self, live, node, path)
        elif isinstance(live, (files.File, files.Folder)):
            leaf_binding.bind_files(self, live, node, path)
        elif is_stateful(live):
            leaf_binding.bind_stateful(self, live, node, path)
        elif isinstance(live, np.ndarray):
            leaf_binding.bind_array(self, live, node, path)
        elif isinstance(live, dict):
            container_binding.bind_mapping(self, live, node, path)
        elif is_sequence(live) and is_filled(live):
            container_binding.bind_sequence(self, live, node, path)
        elif dataclasses.is_dataclass(live) and not isinstance(live, type) and (is_mutable(live) or is_filled(live)):
            container_binding.bind_fields(self, live, node, path)
        elif type(live) is list and type(node) is list:
            self.plain(node, path, lambda value: live.__setitem__(slice(None), value))
        elif type(live) is collections.deque and tag == "deque":
            self.plain(node, path, lambda value: refill(live, value))
        elif path.is_root():
            raise TypeError(f"into is a {type(live).__qualname__}; use a module, an optimizer or a container of them")
        else:
            self.plain(node, path, put)
