"""Old commits are dropped beside training: on a thread of its own, whenever a commit has become durable."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tierload.engine import PendingSave, Store

__all__ = ["Keeping", "Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """What ``Store.collect`` is given. Without ``keep`` nothing is dropped."""

    keep: int | None
    keep_every: int | None
    keep_best: str | None


class Keeping:
    """The retention of one store. Calls come from one thread."""

    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention
        self._pending: list[PendingSave] = []
        self._due = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def saved(self, pending: PendingSave) -> None:
        """A save is on its way; what it makes superfluous is dropped when it is durable."""
        self._pending.append(pending)
        self.look()

    def look(self) -> None:
        """Between two steps: begins what is due. Raises what went wrong in the last collection."""
        done = [pending for pending in self._pending if pending.done()]
        self._pending = [pending for pending in self._pending if pending not in done]
        self._due = self._due or any(pending.error is None for pending in done)  # failures are the store's to raise
        if self._thread is not None and self._thread.is_alive():
            return
        self._raise()
        if self._due:
            self._due = False
            self._thread = threading.Thread(target=self._collect, name="tierload-collect", daemon=True)
            self._thread.start()

    def finish(self, *, collect: bool) -> None:
        """Waits for what was begun; and drops what is left to drop, when all saves are durable."""
        if self._thread is not None:
            self._thread.join()
        self._raise()
        if collect:
            self._collect()
            self._raise()

    def _collect(self) -> None:
        try:
            wanted = self._retention
            self._store.collect(keep=wanted.keep, keep_every=wanted.keep_every, keep_best=wanted.keep_best)
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop, between two steps
            self._error = error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
