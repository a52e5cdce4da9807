"""How kvikio is set while tierload uses it, and not a moment longer: its settings are those of the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

__all__ = ["TASK_BYTES", "more_threads", "opening", "threads"]

TASK_BYTES = 8 << 20
"""One task of one thread: half of kvikio's bounce buffer and of what cuFile moves at once, so it is a single call of
either; with eight threads, 64 MiB are under way, which kept the devices seen busy."""

_THREADS = 8  # kvikio's own default is one, and a thread waits for its copy before it reads on

_lock = threading.Lock()
_raised = ExitStack()
_users = 0


def threads(kvikio: ModuleType) -> int:
    """How many threads kvikio has while tierload uses it: a user who set more keeps them."""
    return max(_THREADS, int(kvikio.defaults.get("num_threads")))


@contextmanager
def more_threads(kvikio: ModuleType) -> Iterator[None]:
    """Inside, kvikio's pool has more threads. Of several at a time the first raises it, and the last puts it back."""
    global _users
    with _lock:
        if not _users:
            _raised.enter_context(kvikio.defaults.set({"num_threads": threads(kvikio)}))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _raised.close()


@contextmanager
def opening(kvikio: ModuleType, *, direct: bool) -> Iterator[None]:
    """Files opened inside go directly or through kvikio's compatibility mode, and never the one while saying the other.

    That is what its AUTO does, file by file; and where there is no driver, cuFile would still be tried.
    """
    mode = kvikio.CompatMode.OFF if direct else kvikio.CompatMode.ON
    with _lock, kvikio.defaults.set({"compat_mode": mode}):
        yield
