"""What a load has to do once its document is understood: where bytes go, and what happens when they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tierload.errors import KeyMismatch
from tierload.state.keys import KeyFilter, Path
from tierload.state.pause import paused_collection
from tierload.state.reader import Reader
from tierload.types import ChunkTable, Destinations

__all__ = ["LoadPlan", "plan_load", "refuse_unused"]


class LoadPlan:
    """A planned load. The engine reads each chunk's bytes into its destination, all of them, and calls ``finish``.

    ``in_place`` are the chunks whose destination is memory of the target itself: from the first byte that is read
    into one, the target has changed.
    """

    def __init__(
        self,
        chunks: ChunkTable,
        destinations: Destinations,
        in_place: Iterable[int],
        users: Mapping[int, Sequence[Path]],
        finish: Callable[[], object],
    ) -> None:
        self.chunks = chunks
        self.destinations = destinations
        self.in_place = frozenset(in_place)
        self._users = users
        self._finish = finish

    def keys_of(self, chunk: int) -> tuple[str, ...]:
        """The keys that the bytes of ``chunk`` go to."""
        users = self._users.get(chunk)
        if users:
            return tuple(sorted({path.text() for path in users}))
        return (self.chunks.key(chunk),) if chunk in self.destinations.chunks else ()

    def finish(self) -> object:
        """Hand out the state, or a ``LoadReport`` where a target has been filled. To be called once."""
        return self._finish()


def plan_load(
    document: bytes,
    chunks: ChunkTable,
    *,
    keys: Sequence[str] | None = None,
    types: Sequence[type] = (),
    allow_pickle: bool = False,
) -> LoadPlan:
    """Plan to load a state, or the part of it whose keys match ``keys``, into new memory.

    A type is rebuilt when it is among ``types`` or registered; else its values are plain ones. Of a sequence in which
    only some elements match, the others are None.

    Raises:
        CorruptStore: The document contradicts itself or the chunks.
        UnsupportedValue: It holds a pickle and ``allow_pickle`` is false, or a dtype that this torch lacks.
        KeyMismatch: A pattern of ``keys`` matches nothing.
    """
    wanted = None if keys is None else KeyFilter(keys)
    with paused_collection():
        reader = Reader(document, chunks, types=types, allow_pickle=allow_pickle, keys=wanted)
        state = reader.whole()
        if not reader.late:
            reader.release()  # before the collector runs again and looks through all nodes
    refuse_unused(wanted)

    def finish() -> object:
        reader.arrived()
        with paused_collection():
            return reader.whole() if reader.late else state

    return LoadPlan(chunks, reader.memory.destinations(), (), reader.users, finish)


def refuse_unused(keys: KeyFilter | None) -> None:
    """Refuse patterns that matched nothing: most likely a mistake in one.

    Raises:
        KeyMismatch: There is one.
    """
    unused = [] if keys is None else keys.unused()
    if unused:
        raise KeyMismatch(
            f"no key of the stored state matches {', '.join(map(repr, unused))}; `*` matches any text, also `/`",
            missing=unused,
        )
