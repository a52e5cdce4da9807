"""The copy that ``async_save`` makes of a state before the loop goes on. Its memory is kept: memory that was never
touched costs ten times what the copy does."""

from __future__ import annotations

import os
import weakref
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

__all__ = ["stage"]

_PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""As ``async_save`` has it by itself."""


class _Staged(dict[str, Any]):
    """A copy. It lives as long as a save works on it."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return dict, (dict(self),)


class _Kept:
    """torch's stager, which keeps the memory of its copies, and what it copied last."""

    def __init__(self) -> None:
        self.stager = DefaultStager(_PLAIN)
        self.last: weakref.ref[_Staged] | None = None


_kept: dict[str, _Kept] = {}  # by the path of the store: writers come and go


def stage(state: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of a state in CPU memory. Tensors that share memory do so in the copy, too."""
    kept = _kept.setdefault(os.path.realpath(path), _Kept())
    if kept.last is not None and kept.last() is not None:  # a save still reads it
        return _Staged(DefaultStager(_PLAIN).stage(state))  # type: ignore[arg-type]
    try:
        staged = _Staged(kept.stager.stage(state))  # type: ignore[arg-type]
    except AssertionError:  # a tensor has been resized: torch's stager keeps memory of its first size for it
        kept.stager = DefaultStager(_PLAIN)
        staged = _Staged(kept.stager.stage(state))  # type: ignore[arg-type]
    kept.last = weakref.ref(staged)
    return staged


os.register_at_fork(after_in_child=_kept.clear)
