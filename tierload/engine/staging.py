"""A state as it was at one moment: copied into memory of the store's own, in part beside the training loop. What
accelerators have is cloned there, where there is room for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.engine.accelerators import streams
from tierload.engine.saving import Draft
from tierload.errors import AcceleratorError, TornSave

__all__ = ["Snapshot"]


class Snapshot:
    """The copy of one state. What is ``late`` may be copied after ``copy_now`` has returned; whoever is about to change
    it calls ``settle`` before.

    ``settled`` is called once, by whatever thread sees first that nothing is left to copy. ``error`` is then set when
    the copy is not of one moment. A ``clone`` of what accelerators have is in turn with their work: a step that is
    begun after it does not change it, so nobody waits for it there.
    """

    def __init__(
        self,
        draft: Draft,
        arena: _native.Arena,
        late: _native.GuardedMemory | None,
        *,
        clone: _native.Clone | None = None,
        threads: int,
        settled: Callable[[], None],
    ) -> None:
        self._late_chunks = _late_chunks(draft, late)
        if clone is not None:
            self._late_chunks &= draft.flat.devices == 0
        mask = _late_pages(draft, self._late_chunks)
        self.staging = _native.Staging(draft.page_set, mask, arena, clone, streams(draft.devices))
        self.error: TornSave | AcceleratorError | None = None
        self._clone = clone
        self._threads = threads
        self._draft: Draft | None = draft
        self._late = late if mask.any() else None
        self._settled: Callable[[], None] | None = settled
        self._lock = threading.RLock()

    def copy_now(self) -> None:
        """Copies what has to be copied before the call returns, and begins with the rest."""
        self.staging.copy_now(self._threads)
        if self._late is None or self.staging.complete:  # in waves, a page that could be late may come before others
            self._finish_if_cloned()
        else:
            self.staging.start()

    def settle(self) -> None:
        """Returns when the state may change; the caller helps to copy what is left."""
        try:
            self.staging.help(self._threads)
        except AcceleratorError as error:  # whoever writes it meets the same; the caller is no part of it
            self.error = error
            self.staging.wait_done(None)
        self._finish_if_cloned()

    def wait(self, timeout: float | None) -> bool:
        """Whether the state may change, after up to ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        done = self.staging.wait_done(timeout)
        done = done and self._cloned(None if end is None else max(end - time.monotonic(), 0))
        if done:
            self._finish()
        return done

    def check(self) -> None:
        """Raises when the copy is not of one moment. It is complete, since it was written."""
        self.wait(None)
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Gives the copy up; what was not copied yet never will be."""
        self.staging.abandon()
        self.wait(None)

    @property
    def finishes_here(self) -> bool:
        """Whether this thread is about to let go of the state."""
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def _finish_if_cloned(self) -> None:
        if self._cloned(0):
            self._finish()

    def _cloned(self, timeout: float | None) -> bool:
        """Whether the accelerators are done with the state."""
        try:
            return self._clone is None or self._clone.wait_done(timeout)
        except AcceleratorError as error:  # whoever writes it meets the same
            self.error = error
            return True

    def _finish(self) -> None:
        """Lets go of the state: nobody reads from it any more. Where an interrupt ends this early, the next call does
        it."""
        if self._draft is None:
            return
        with self._lock:
            draft, late = self._draft, self._late
            if draft is None:
                return
            changed = _changed_chunks(draft, late, self._late_chunks) if late is not None else []
            if self._draft is None:
                return  # a signal handler has done it meanwhile
            if changed:
                self.error = _torn(draft, changed)
            draft.let_go()
            settled = self._settled
            if settled is not None:
                settled()
            self._draft = self._late = self._settled = None  # that may be a method of who has this object


def _late_chunks(draft: Draft, late: _native.GuardedMemory | None) -> npt.NDArray[np.bool_]:
    """Which chunks may be copied late: large ones that lie whole in guarded memory."""
    flat, plan = draft.flat, draft.plan
    if late is None:
        return np.zeros(len(flat.chunks), np.bool_)
    held = late.holds(flat.pointers, flat.chunks.nbytes).astype(np.bool_)
    held[list(flat.strides)] = False
    alone = np.zeros(len(held), np.bool_)
    alone[plan.owners[: _alone(draft)]] = True
    return held & alone


def _late_pages(draft: Draft, late_chunks: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """1 for each page of these chunks."""
    mask = np.zeros(len(draft.plan.packed), np.uint8)
    alone = _alone(draft)
    mask[:alone] = late_chunks[draft.plan.owners[:alone]]
    return mask


def _alone(draft: Draft) -> int:
    """How many pages have one chunk each, which is one part: they come first."""
    return len(draft.plan.packed) - int(draft.plan.packed.sum())


def _changed_chunks(draft: Draft, late: _native.GuardedMemory, late_chunks: npt.NDArray[np.bool_]) -> list[int]:
    """Which of the chunks were changed. Guarded tensors that are not in this state may change, and so may those of it
    that were copied at the call."""
    numbers = np.flatnonzero(late_chunks)
    starts = draft.flat.pointers[numbers]
    ends = starts + draft.flat.chunks.nbytes[numbers].astype(np.uint64)
    hit = np.zeros(len(numbers), np.bool_)
    for start, end in late.changed().reshape(-1, 2):
        hit |= (starts < end) & (ends > start)
    found: list[int] = numbers[hit].tolist()
    return found


def _torn(draft: Draft, changed: list[int]) -> TornSave:
    keys = draft.flat.chunks.keys_at(changed)
    shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return TornSave(
        f"{shown} changed outside of the optimizer's step while it was still "
        "being copied, so this save was given up. Change weights between steps inside `with pending.mutating():`; if "
        "the step itself runs elsewhere, say so with tierload.guard(optimizer, steps_elsewhere=True)",
        keys=keys,
    )
