"""A hot start: a target that is handed over at once, and used while its tensors arrive, most urgent first.

Its order: open the commit → compare the target, give it memory, schedule what it is to hold → lock what is hot → make
its tensors wait. What follows is ``Arrivals``' work.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from tierload.engine.arriving import Arrivals
from tierload.engine.calls import Calls
from tierload.engine.hot_memory import HotMemory
from tierload.engine.loading import Source, fill
from tierload.engine.pinned import PinnedPages
from tierload.errors import HotStartTimeout, InvalidRequest
from tierload.observe import Progress, size
from tierload.settings import hot_bytes
from tierload.state import Arriving, HotPlan, device_of
from tierload.tiers import (
    FirstUse,
    first_uses,
    of_modules,
    tensor_names,
    urgency,
    worker_cores,
)
from tierload.types import Commit, HeatTable, LoadReport

__all__ = ["HotProgress", "HotStart", "Stage"]

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the four steps of a hot start: ``open``, ``cold``, ``hot`` and ``bind``; ``told`` is for people."""

    name: str
    seconds: float
    told: str

    def __str__(self) -> str:
        return f"{self.name:<5} {self.seconds * 1e3:9.3f} ms  {self.told}"


@dataclass(frozen=True, slots=True)
class HotProgress:
    """How far a hot start is: tensors and raw bytes that are there, and how long uses have waited for others."""

    tensors: int
    total_tensors: int
    bytes: int
    total_bytes: int
    stalled_seconds: float


@dataclass(frozen=True, slots=True)
class HotOptions:
    """What the caller of a hot start chose; see ``Store.hot_start``."""

    model: torch.nn.Module | None
    example: tuple[Any, ...] | Mapping[str, Any] | None
    heat: HeatTable | None
    hot_budget_bytes: int
    progress: bool


class HotStart:
    """A target whose tensors arrive: parameters, buffers and states of optimizers are the objects that they were, and
    the first use of one waits for it, and for no other. Whatever was computed is as after a ``load``.

    ``stages`` are the four steps that were taken before it was handed over, each timed. ``report`` is that of a load
    into the target. The memory of hot tensors stays locked as long as this is known.
    """

    def __init__(
        self,
        source: Source,
        plan: HotPlan,
        pages: PinnedPages,
        opened: Stage,
        options: HotOptions,
        threads: int,
        rank: int,
        start: float,
    ) -> None:
        self.commit: Commit = source.commit
        self.report, units = plan.begin(lambda part: fill(source, part, threads, rank))
        of_tensor = {id(tensor): number for number, unit in enumerate(units) for tensor in unit.tensors}
        model = plan.modules[0] if options.model is None and plan.modules else options.model
        self._names = {unit.key: number for number, unit in enumerate(units)}
        positions, source_of_order = np.full(len(units), np.inf), "the store"
        if model is not None:
            all_names = tensor_names(model)
            names_of = {of_tensor[id(tensor)]: names for tensor, names in all_names.items() if id(tensor) in of_tensor}
            stored = {units[number].key: names[0] for number, names in names_of.items()}
            uses = _uses(model, options, stored, all_names)
            source_of_order = uses.source
            for number, names in names_of.items():
                self._names.update(dict.fromkeys(names, number))
                positions[number] = uses.positions.get(names[0], np.inf)
        heat = _heat_of(units, options.heat)
        cores = worker_cores()
        self._arrivals = Arrivals(source, units, _ranks(positions, units, heat), pages, rank, cores.count)
        self._calls = Calls(self._arrivals, units, positions)
        total = self._arrivals.native.total_bytes
        self._hot = HotMemory(
            _hot_regions(units, positions, heat, hot_bytes(options.hot_budget_bytes, total)), cores.node
        )
        self._unlock = weakref.finalize(self, self._hot.unlock)
        self._unlock.atexit = False
        now = time.perf_counter()
        cold = Stage("cold", now - start, f"{len(units)} tensors, {size(total)}, in the order of {source_of_order}")
        if plan.makes_memory:
            self._hot.lock()  # before anybody faults pages in, for whom it would have to wait
        now = time.perf_counter()
        try:
            self._arrivals.start(lambda: cores.settle(), self._calls.close)
            self._calls.watch()  # before the gates, which may open at once
            self._arrivals.gate()
            if not plan.makes_memory:
                self._arrivals.run(self._hot.lock)
        except BaseException:  # no thread is to be had, or Ctrl-C: nobody would know of what goes on
            self.close()
            raise
        self._stages = opened, cold, Stage("bind", time.perf_counter() - now, f"{cores}")
        if options.progress:
            threading.Thread(target=self._show, name="tierload-progress", daemon=True).start()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The four of them. Where memory was there before, it is locked meanwhile, and this waits for that."""
        opened, cold, bind = self._stages
        return opened, cold, Stage("hot", *self._hot.told()), bind

    @property
    def ready(self) -> bool:
        """Whether everything has arrived."""
        return self._arrivals.ready

    @property
    def progress(self) -> HotProgress:
        """How far it is."""
        arrivals = self._arrivals
        return HotProgress(
            arrivals.arrived_units,
            arrivals.total,
            arrivals.native.bytes,
            arrivals.native.total_bytes,
            arrivals.stalled_seconds,
        )

    def wait(self, name: str, timeout: float | None = None) -> None:
        """Waits for one tensor, by its name in the module or its key in the store; it is fetched next.

        Raises:
            InvalidRequest: There is none of that name.
            CorruptPage: A page of it is damaged.
            HotStartTimeout: It is not there after ``timeout`` seconds.
        """
        unit = self._names.get(name)
        if unit is None:
            if name in self.report.loaded:
                return  # it was there from the beginning
            raise InvalidRequest(f"the hot start has no tensor {name!r}")
        if not self._arrivals.wait(unit, timeout):
            raise HotStartTimeout(f"{name!r} is not there after {timeout} s; it is still on its way")

    def join(self, timeout: float | None = None) -> LoadReport:
        """Waits for everything, and returns the report of the load.

        Raises:
            CorruptPage: A page is damaged; everything else is there, and uses of this one raise.
            HotStartTimeout: Not after ``timeout`` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        failure: BaseException | None = None
        for unit in range(self._arrivals.total):
            left = None if end is None else max(end - time.monotonic(), 0)
            try:
                there = self._arrivals.wait(unit, left)
            except (OSError, RuntimeError, MemoryError) as error:
                failure = failure or error
                continue
            if not there:
                raise HotStartTimeout(f"{self!r} is not complete after {timeout} s; it goes on")
        self._arrivals.end()
        self._calls.close()
        if failure is not None:
            raise failure
        return self.report

    def close(self) -> None:
        """Has nothing more fetched: uses of what is not there raise. Lets the memory of hot tensors be."""
        self._arrivals.stop()
        self._calls.close()
        self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.join()
        self.close()

    def __repr__(self) -> str:
        far = self.progress
        return (
            f"HotStart(step {self.commit.step}: {far.tensors} of {far.total_tensors} tensors, "
            f"{size(far.bytes)} of {size(far.total_bytes)})"
        )

    def _show(self) -> None:
        with Progress(f"tierload: hot start of step {self.commit.step}") as shown:
            while not self._arrivals.native.over:
                far = self.progress
                shown.update(far.bytes, far.total_bytes, f"{far.tensors} of {far.total_tensors} tensors")
                time.sleep(_LOOK_S)


def _uses(
    model: torch.nn.Module,
    options: HotOptions,
    names: Mapping[str, str],
    names_of: Mapping[torch.Tensor, tuple[str, ...]],
) -> FirstUse:
    """When a pass uses what: as the example says, as the commit's heat recorded it, or as modules are registered.
    ``names`` are those in the model, by key in the store; ``names_of``, by tensor."""
    heat = options.heat
    if heat is not None:
        heat = replace(heat, keys=tuple(names.get(key, key) for key in heat.keys))
    if options.example is not None:
        return first_uses(model, options.example, heat)
    if heat is not None and (heat.first_use >= 0).any():
        return first_uses(model, None, heat)
    return of_modules(model, names_of)


def _heat_of(units: Sequence[Arriving], table: HeatTable | None) -> npt.NDArray[np.float64]:
    if table is None:
        return np.zeros(len(units))
    known = dict(zip(table.keys, table.heat.tolist(), strict=True))
    return np.array([known.get(unit.key, 0.0) for unit in units], np.float64)


def _ranks(
    positions: npt.NDArray[np.float64], units: Sequence[Arriving], heat: npt.NDArray[np.float64]
) -> npt.NDArray[np.uint32]:
    """By first use; then what no pass uses; states of optimizers last. Below them is room for what is urgent."""
    states = np.array([unit.state for unit in units], bool)
    distance = np.where(states, np.inf, positions)
    return urgency.ranks(distance, np.where(states, -1.0, heat)) + np.uint32(len(units))


def _hot_regions(
    units: Sequence[Arriving], positions: npt.NDArray[np.float64], heat: npt.NDArray[np.float64], budget_bytes: int
) -> list[tuple[int, int]]:
    """Address and bytes of the hottest tensors that fit the budget; where no heat is known, of those that are used
    first."""
    order = np.lexsort((positions, -heat)) if heat.any() else np.argsort(positions, kind="stable")
    regions: list[tuple[int, int]] = []
    for number in order.tolist():
        unit = units[number]
        tensor = unit.tensors[0]
        if unit.state or not tensor.is_cpu or device_of(tensor) or tensor.nbytes > budget_bytes:
            continue
        budget_bytes -= tensor.nbytes
        regions.append((tensor.data_ptr(), tensor.nbytes))
    return regions
