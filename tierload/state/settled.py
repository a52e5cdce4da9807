"""A target that has been compared with what is stored: where every chunk goes, and what is done when it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tierload.state import module_binding
from tierload.state.fills import Fill, Fills, untie
from tierload.state.keys import Path
from tierload.state.plan import LoadPlan
from tierload.state.tensors import is_within_reach
from tierload.state.views import whole_view
from tierload.types import LoadReport

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["Settled"]


class Settled:
    """What a ``Binder`` has found, settled. Differences that only show here are added to its problems.

    ``valued`` are the chunks that values need, and not only tensors of the target that are filled.
    """

    def __init__(self, binder: Binder) -> None:
        self.binder = binder
        memory = binder.reader.memory
        ranges = [fill.range for fill in binder.fills if is_within_reach(fill.live) and fill.live.numel()]
        for chunk, row, live in memory.unbind([fill.view.chunk for fill in binder.fills], ranges):
            place = Path.of_text(chunk.key)
            binder.fills.append(Fill(live, whole_view(chunk, row), place))
            binder.loaded.append(place)
        for second in self._clashes():
            binder.problems.unexpected(
                second.path, "shares memory with another key in the target, and not in the store"
            )
            binder.fills = [fill for fill in binder.fills if fill is not second]
            binder.materials = [fill for fill in binder.materials if fill is not second]
            binder.loaded = [path for path in binder.loaded if path is not second.path]
        self.valued = memory.asked_for()
        self.fills = Fills(memory)
        for fill in binder.materials:
            fill.view.data(memory)
        self.fills.settle(binder.fills)
        bound, self.bound_tensors = memory.bound()
        self.bound = bound.tolist()
        self.fills.touch([*self.bound_tensors, *binder.touched])
        filled = [*self.fills.direct, *zip(self.bound, self.bound_tensors, strict=True)]
        self.in_place = frozenset(number for number, live in filled if id(live) not in binder.made).union(
            part.chunk for part in binder.parts
        )
        self.destinations = memory.destinations(self.fills.direct, binder.parts)
        binder.lost.shut({id(live) for live in (*self.bound_tensors, *(fill.live for fill in binder.fills))})

    def plan(self) -> LoadPlan:
        """The plan of a load that acts when everything is there."""

        def finish() -> LoadReport:
            self.make()
            self.fills.copy()
            self.act()
            return self.report()

        reader = self.binder.reader
        return LoadPlan(reader.memory.chunks, self.destinations, self.in_place, reader.users, finish)

    def make(self) -> None:
        """Gives tensors on meta their memory; values are final from here on."""
        binder = self.binder
        binder.reader.arrived()
        module_binding.materialize(binder.materials, binder.reader.memory, binder.modules)
        module_binding.materialize_spread((live, part) for live, part, _ in binder.spread_materials.values())
        binder.spread_materials.clear()

    def act(self) -> None:
        """Does what is left, in order."""
        binder = self.binder
        acts: list[Callable[[], None]] = [*binder.actions, *binder.last]
        # They know the binder: the target would live on in a circle until the next collection.
        binder.actions.clear()
        binder.last.clear()
        for act in acts:
            act()

    def report(self) -> LoadReport:
        """What was filled, and what did not match."""
        binder = self.binder
        loaded = {path.text() for path in binder.loaded}.union(binder.reader.memory.chunks.keys_at(self.bound))
        return binder.problems.report(sorted(loaded), sorted(set(binder.converted)), list(binder.reader.notes))

    def _clashes(self) -> Iterable[Fill]:
        """Fills whose memory in the target another one has, with other bytes."""
        first: dict[int, Fill] = {}
        tied = [
            fill
            for fill in self.binder.materials
            if first.setdefault(id(fill.live), fill).view.chunk != fill.view.chunk
        ]
        return [*tied, *(second for _, second in untie(self.binder.fills))]
