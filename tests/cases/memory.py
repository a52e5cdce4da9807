"""How much memory this process has needed at most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


@contextmanager
def peak() -> Iterator[list[int]]:
    """The list holds, after the block, by how many bytes the block's peak was above what was resident before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    result: list[int] = []
    yield result
    result.append(_status("VmHWM") - before)
