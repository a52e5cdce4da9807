"""Memory that stays where it is: locked against swapping, on the NUMA node of the training's cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.tiers.cores import numa_nodes

__all__ = ["MemoryLock", "lock_memory", "unlock_memory"]


@dataclass(frozen=True, slots=True)
class MemoryLock:
    """What came of it, in bytes of whole pages: ``locked_bytes`` and ``refused_bytes``, the latter for ``reason``.

    ``method`` is the system call that locked: ``"mlock2"``, ``"mlock"`` (which, unlike the other, has touched every
    byte), or empty. ``placing`` says why memory could not be given to the node; empty if it could, or had not to.
    """

    locked_bytes: int
    refused_bytes: int
    reason: str
    method: str
    placing: str


def lock_memory(addresses: npt.ArrayLike, lengths: npt.ArrayLike, node: int | None = None) -> MemoryLock:
    """Locks regions of memory, ``lengths`` in bytes, in one call for all: as much as this process may, the first ones
    first. It costs a system call for each region that stands alone, nothing for each byte.

    ``node`` is where pages that are not there yet shall come from; it is minded where there is more than one. What the
    system does not allow is no failure, the result says it. A region that is locked already counts against the limit
    again. Memory that is freed is unlocked with its pages, which a heap may keep: unlock it before.

    Raises:
        InvalidRequest: A region is beyond the end of memory, or addresses and lengths are not of one number.
    """
    several = node is not None and len(numa_nodes()) > 1
    report = _native.lock_memory(_column(addresses), _column(lengths), node if several else None)
    return MemoryLock(report.locked, report.refused, report.reason, report.method, report.placing)


def unlock_memory(addresses: npt.ArrayLike, lengths: npt.ArrayLike) -> MemoryLock:
    """Unlocks regions, with the rest of the pages that they begin and end in, so all of a batch together: in the result
    ``locked_bytes`` are those that no longer are, ``refused_bytes`` those that are not mapped any more.

    Raises:
        InvalidRequest: As ``lock_memory``.
    """
    report = _native.unlock_memory(_column(addresses), _column(lengths))
    return MemoryLock(report.locked, report.refused, report.reason, report.method, report.placing)


def _column(numbers: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(numbers, np.uint64)
