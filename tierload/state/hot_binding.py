"""Loading into a target that is used before everything is there: which tensors arrive by themselves, and what has to be
there first."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tierload.state.bind import Binder
from tierload.state.documents import WholeState
from tierload.state.fills import Fill, copy
from tierload.state.gates import Lost
from tierload.state.keys import KeyFilter, Path
from tierload.state.pause import paused_collection
from tierload.state.plan import LoadPlan, refuse_unused
from tierload.state.reader import Reader
from tierload.state.settled import Settled
from tierload.state.stored_parts import Part, find_parts
from tierload.state.targets import Put
from tierload.types import ChunkTable, LoadReport

__all__ = ["Arriving", "HotPlan", "plan_hot"]

Read = Callable[[LoadPlan], None]
"""Reads all that a plan wants."""


@dataclass(frozen=True, slots=True, eq=False)
class Arriving:
    """Tensors of the target that are complete once ``plan`` has been read and ``copy`` was called; ``state`` says that
    they are an optimizer's."""

    key: str
    tensors: tuple[torch.Tensor, ...]
    plan: LoadPlan
    copies: tuple[tuple[Fill, torch.Tensor], ...] = ()
    state: bool = False

    def copy(self) -> None:
        """Fills those that are not read into directly."""
        with torch._C.DisableTorchFunctionSubclass():  # they wait for this
            for fill, source in self.copies:
                copy(fill, source)
            for device in {fill.live.device for fill, _ in self.copies if fill.live.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # who uses them next may be on another stream


class HotPlan:
    """A planned hot start of a target, whose modules and optimizers the lists name."""

    def __init__(self, settled: Settled, states: Settled | None) -> None:
        self.modules = settled.binder.modules
        self.makes_memory = bool(settled.binder.materials)  # that no page of is there yet
        self.optimizers = [live for live, _, _ in settled.binder.optimizers]  # type: ignore[attr-defined]
        self._settled = settled
        self._states = states  # of the optimizers, if there are any

    def begin(self, read: Read) -> tuple[LoadReport, list[Arriving]]:
        """Gives the target everything but the bytes of the tensors that arrive later, which are returned."""
        settled = self._settled
        arriving = _arriving_tensors(settled)
        here = {int(one.plan.destinations.chunks[0]) for one in arriving}
        read(_plan(settled, lambda chunk: chunk not in here, parts=True))
        settled.make()
        settled.fills.copy({int(chunk) for chunk in settled.destinations.chunks} - here)
        settled.act()
        if self._states is None:
            return settled.report(), arriving
        own = {id(tensor) for one in arriving for tensor in one.tensors}
        of_states, loaded = self._begin_states(self._states, own, read)
        report = settled.report()
        return replace(report, loaded=tuple(sorted({*report.loaded, *loaded}))), [*arriving, *of_states]

    def _begin_states(
        self, states: Settled, others: Container[int], read: Read
    ) -> tuple[list[Arriving], Iterable[str]]:
        """The same for the states of optimizers, but for tensors that are ``others``, by identity; and their keys."""
        whole = states.plan()
        arriving: list[Arriving] = []
        if _only_hands_out(states, self.optimizers):
            report = whole.finish()
            arriving = _arriving_states(states, self.optimizers, others)
            later = {int(one.plan.destinations.chunks[0]) for one in arriving}
            read(_plan(states, lambda chunk: chunk not in later))
        else:
            read(whole)
            report = whole.finish()
        assert isinstance(report, LoadReport)
        return arriving, report.loaded


def plan_hot(
    document: bytes,
    chunks: ChunkTable,
    into: object,
    *,
    key: str | None = None,
    keys: Sequence[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    types: Sequence[type] = (),
    allow_pickle: bool = False,
    whole: WholeState | None = None,
) -> HotPlan:
    """Plan to load a state into ``into``, as ``plan_bind`` does, whose tensors arrive later. Where ``into`` is a pair
    of a module and its optimizer (or None), the two are parts of the state: the module at ``key``, or where it is.

    Raises:
        KeyMismatch: Store and target differ and ``strict`` is true, or nothing in the store, or more than one thing, is
            like the module; nothing has changed.
        CorruptStore, UnsupportedValue: As there.
    """
    wanted = None if keys is None else KeyFilter(keys)
    with paused_collection():
        reader = Reader(document, chunks, types=types, allow_pickle=allow_pickle, keys=wanted)
        parts: list[Part] | None = None
        losts = [Lost(), Lost()]  # of the modules, and of the optimizers
        try:
            if isinstance(into, tuple):
                model, optimizer = into
                for tensor in (*model.parameters(), *model.buffers()):
                    losts[0].await_tensor(tensor)  # its state_dict does
                into, parts = find_parts(reader, model, optimizer, key)
            binder = _HotBinder(reader, into, strict=strict, cast=cast, whole=whole)
            binder.lost = losts[0]
            binder.walk(parts)
            states: Binder | None = None
            if binder.optimizers:
                states = Binder(reader.twin(), into, strict=strict, cast=cast, whole=whole)
                states.problems, states.lost = binder.problems, losts[1]
                states.walk(binder.optimizers)
            plan = HotPlan(Settled(binder), None if states is None else Settled(states))
            if strict:
                binder.problems.refuse()
            refuse_unused(wanted)
        except BaseException:
            for lost in losts:
                lost.shut()
            raise
    return plan


class _HotBinder(Binder):
    """Leaves the optimizers to another binder, whose memory is its own."""

    def __init__(self, reader: Reader, into: object, **options: Any) -> None:
        super().__init__(reader, into, **options)
        self.optimizers: list[tuple[torch.optim.Optimizer, object, Path]] = []

    def _bind(self, live: Any, node: object, path: Path, put: Put | None) -> None:
        if isinstance(live, torch.optim.Optimizer):
            self.optimizers.append((live, node, path))
        else:
            super()._bind(live, node, path, put)


def _plan(settled: Settled, which: Callable[[int], bool], *, parts: bool = False) -> LoadPlan:
    """The plan of some of the chunks, for whoever reads and does nothing else."""
    whole, reader = settled.destinations, settled.binder.reader
    destinations = whole.some([which(chunk) for chunk in whole.chunks.tolist()])
    if parts:
        destinations = replace(destinations, parts=whole.parts)
    return LoadPlan(reader.memory.chunks, destinations, settled.in_place, reader.users, lambda: None)


def _arriving_tensors(settled: Settled) -> list[Arriving]:
    """The tensors that nobody can use before their bytes are there: each of them can be made to wait, and its chunk is
    needed for nothing else."""
    binder = settled.binder
    lives: dict[int, dict[int, torch.Tensor]] = {}
    for number, live in [
        *((fill.view.chunk, fill.live) for fill in (*binder.fills, *binder.materials)),
        *zip(settled.bound, settled.bound_tensors, strict=True),
    ]:
        lives.setdefault(number, {})[id(live)] = live
    copies = settled.fills.copies()
    refused = settled.valued.union(_made_by_copying(binder.materials), (part.chunk for part in binder.parts))
    scripted = _scripted(binder.modules)
    table = binder.reader.memory.chunks
    here = set(settled.destinations.chunks.tolist()) - refused
    return [
        Arriving(
            table.key(number),
            tuple(tensors.values()),
            _one(settled, number),
            tuple(copies.get(number, ())),
        )
        for number, tensors in lives.items()
        if number in here and all(_can_wait(one) and id(one) not in scripted for one in tensors.values())
    ]


def _one(settled: Settled, chunk: int) -> LoadPlan:
    whole, reader = settled.destinations, settled.binder.reader
    at = whole.chunks.searchsorted(chunk)
    return LoadPlan(reader.memory.chunks, whole.some(slice(at, at + 1)), settled.in_place, reader.users, lambda: None)


def _can_wait(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() > 0


def _made_by_copying(materials: Iterable[Fill]) -> set[int]:
    """The chunks of tensors on meta whose memory is made out of what was read."""
    first: dict[int, Fill] = {}
    return {
        fill.view.chunk
        for fill in materials
        if first.setdefault(fill.view.chunk, fill).live is not fill.live or fill.live.dtype is not fill.view.row.torch
    }


def _scripted(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Tensors of modules that run without Python, where nothing can make them wait."""
    return {
        id(tensor)
        for module in modules
        for inner in module.modules()
        if isinstance(inner, torch.jit.ScriptModule)
        for tensor in (*inner.parameters(), *inner.buffers())
    }


def _only_hands_out(states: Settled, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether the states of optimizers are set as they lie in memory, so that their bytes may come later."""
    base = torch.optim.Optimizer
    return (
        not states.fills.copies()
        and not states.binder.reader.late
        and not states.binder.reader.has_compounds
        and not states.destinations.parts
        and all(parameter.is_cpu for parameter in states.binder.followed)  # others' states are copied
        and all(
            type(live).load_state_dict is base.load_state_dict
            and type(live).__setstate__.__module__.startswith("torch.optim.")  # they look at numbers only
            and not live._optimizer_load_state_dict_pre_hooks
            and not live._optimizer_load_state_dict_post_hooks
            for live in optimizers
        )
    )


def _arriving_states(
    states: Settled, optimizers: Iterable[torch.optim.Optimizer], others: Container[int]
) -> list[Arriving]:
    """The tensors in the states of optimizers that are none of ``others``, by identity."""
    destinations, table = states.destinations, states.binder.reader.memory.chunks
    chunk_at = dict(zip(destinations.pointers.tolist(), destinations.chunks.tolist(), strict=True))
    tensors = {
        id(value): value
        for live in optimizers
        for state in live.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor) and _can_wait(value) and id(value) not in others
    }
    by_chunk: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        chunk = chunk_at.get(tensor.data_ptr())
        if chunk is not None:
            by_chunk.setdefault(chunk, []).append(tensor)
    return [
        Arriving(table.key(chunk), tuple(own), _one(states, chunk), state=True)
        for chunk, own in sorted(by_chunk.items())
        if sum(one.nbytes for one in own) == int(table.nbytes[chunk]) * len(own)
    ]
