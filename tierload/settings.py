"""How a store is written and read. One frozen value, passed down; nothing is read from the environment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Settings", "hot_bytes"]

_HOT_PART = 4  # of the bytes are hot, where the budget leaves it open

_MIB = 1 << 20
_INTERVAL_MS_MAX = 86_400_000  # a day
_CAP_MBPS_MIN = 0.001


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one open store.

    ``compression``: ``"auto"`` (compresses where that is faster than the device, which is measured for a second before
    the first save of 256 MiB or more, and remembered), ``"fast"`` (byte planes with LZ4 and zstd tuned to be nearly
    Huffman only), ``"small"``, or ``"off"``. ``page_bytes``: raw bytes of a page, a power of two from 4 KiB to 16 MiB.
    ``pack_below_bytes``: chunks smaller than this share packed pages. ``max_segment_size_mb``: a segment file ends at
    this size. ``threads``: workers that hash and encode (1: the calling thread alone; 0: one per processor that this
    process may use, at most 16). ``full_every``: every that many commits all pages are written afresh, so that one
    rotten page is not in every commit (0: never). ``io``: ``"auto"`` moves large data past the page cache where the
    kernel and the file system allow it, ``"buffered"`` never does. ``flush_interval_ms``: milliseconds from a segment's
    first byte until the segment is durable; the segment ends early for it (0: no bound). ``bandwidth_cap_mbps``:
    megabytes (10**6 bytes, not bits) a second that this store writes to segments, over all its saves (0: no cap). Where
    the two collide, the cap wins. Segments that took longer than the interval are counted in ``SaveReport.pacing``.
    ``hot_budget_bytes``: where a save has a heat meter (``heat=``), the hottest pages, as many as have so many
    raw bytes, are placed first, and with ``compression="auto"`` stored raw where that is faster to load from the device
    as it was measured (0: a quarter of the state's bytes; of each rank's part where several save together).

    Of saves in the background: ``host_budget_bytes`` bounds the memory for copies of states (0: half of what is
    available; a state that needs more is copied in waves, and the loop waits for them). ``device_budget_bytes``: bytes
    of each accelerator's memory for copies of what it has of states, which are made there in milliseconds (0: half of
    what is free, for each); where that is not enough, the copy goes to the host. ``max_in_flight``: how many may
    be under way; ``on_busy`` says what another call does: ``"wait"`` until one is durable, ``"skip"`` the save, or
    ``"queue"`` behind the others, as far as ``host_budget_bytes`` has memory for one more copy. ``on_failure``:
    ``"raise"`` at the handle, else at the next call on the store, else as the exit status of the process; ``"retry"``
    some times before that, from the copy; or ``"warn"`` in the log alone (and at the handle). ``grace_seconds``: how
    long SIGTERM is held back for saves in flight (0: not at all), and how long an exit waits for one that makes no
    progress.

    Where torch.distributed is initialised: ``ranks`` says who saves, ``"all"`` ranks together into one commit, each of
    which calls every save, or ``"one"``, this process alone. A rank that gives no sign of life for
    ``rank_timeout_seconds`` while others wait for it fails the save, or the load. Values that are not the same on all
    ranks are kept for each of them; ``per_rank`` are patterns of keys for which that is so in any case, and whose
    tensors may have other keys and shapes on each rank; ``replicated`` are those whose values have to be the same
    everywhere.
    """

    compression: Literal["auto", "off", "fast", "small"] = "auto"
    page_bytes: int = _MIB
    pack_below_bytes: int = 32 * 1024
    max_segment_size_mb: int = 128
    threads: int = 0
    full_every: int = 0
    io: Literal["auto", "buffered"] = "auto"
    flush_interval_ms: int = 0
    bandwidth_cap_mbps: float = 0
    hot_budget_bytes: int = 0
    grace_seconds: float = 25.0
    host_budget_bytes: int = 0
    device_budget_bytes: int = 0
    max_in_flight: int = 1
    on_busy: Literal["wait", "skip", "queue"] = "wait"
    on_failure: Literal["raise", "retry", "warn"] = "raise"
    ranks: Literal["all", "one"] = "all"
    rank_timeout_seconds: float = 600.0
    per_rank: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compression not in ("auto", "off", "fast", "small"):
            raise ValueError(f'compression is {self.compression!r}; use "auto", "off", "fast" or "small"')
        if self.io not in ("auto", "buffered"):
            raise ValueError(f'io is {self.io!r}; use "auto" or "buffered"')
        if self.on_busy not in ("wait", "skip", "queue"):
            raise ValueError(f'on_busy is {self.on_busy!r}; use "wait", "skip" or "queue"')
        if self.on_failure not in ("raise", "retry", "warn"):
            raise ValueError(f'on_failure is {self.on_failure!r}; use "raise", "retry" or "warn"')
        if self.ranks not in ("all", "one"):
            raise ValueError(f'ranks is {self.ranks!r}; use "all" or "one"')
        if not self.rank_timeout_seconds > 0:
            raise ValueError(f"rank_timeout_seconds is {self.rank_timeout_seconds}; use more than 0")
        if isinstance(self.per_rank, str) or isinstance(self.replicated, str):
            raise ValueError("per_rank and replicated are tuples of patterns, not texts")
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight is {self.max_in_flight}; it must be at least 1")
        if self.host_budget_bytes != 0 and self.host_budget_bytes < 64 * _MIB:
            raise ValueError(f"host_budget_bytes is {self.host_budget_bytes}; use 0 or at least {64 * _MIB}")
        if self.device_budget_bytes < 0:
            raise ValueError(
                f"device_budget_bytes is {self.device_budget_bytes}; use 0 for half of what is free, or more"
            )
        size = self.page_bytes
        if size & (size - 1) or not 4096 <= size <= 16 * _MIB:
            raise ValueError(f"page_bytes is {size}; use a power of two from 4096 to {16 * _MIB}")
        if not 0 <= self.pack_below_bytes <= size:
            raise ValueError(f"pack_below_bytes is {self.pack_below_bytes}; use 0 to page_bytes ({size})")
        if self.hot_budget_bytes < 0:
            raise ValueError(f"hot_budget_bytes is {self.hot_budget_bytes}; use 0 for a quarter of the state, or more")
        if self.max_segment_size_mb < 1 or self.threads < 0 or self.full_every < 0:
            raise ValueError("max_segment_size_mb must be at least 1; threads and full_every at least 0")
        interval, cap = self.flush_interval_ms, self.bandwidth_cap_mbps
        if not isinstance(interval, int) or not 0 <= interval <= _INTERVAL_MS_MAX:
            raise ValueError(f"flush_interval_ms is {interval!r}; use whole milliseconds, or 0 for no bound")
        if not math.isfinite(cap) or (cap != 0 and cap < _CAP_MBPS_MIN):
            raise ValueError(
                f"bandwidth_cap_mbps is {cap!r}; use megabytes a second, at least {_CAP_MBPS_MIN}, or 0 for no cap"
            )
        if not self.grace_seconds >= 0:  # NaN is not
            raise ValueError(f"grace_seconds is {self.grace_seconds}; use 0 or more")


def hot_bytes(budget_bytes: int, total_bytes: int) -> int:
    """How many of so many bytes are hot by ``hot_budget_bytes``, wherever they are placed or locked."""
    return budget_bytes or total_bytes // _HOT_PART
