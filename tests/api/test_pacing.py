"""Pacing of saves: settings, what a report says, and how a save in the background makes room and is cancelled.

When segments end is tested on a clock of its own in native/tests/pace_test.cpp. Here times are bounded from below only.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.state.alike import assert_alike
from tierload import Pacing, SaveCancelled, Settings, TierloadError, _native
from tierload.engine.saving import page_set
from tierload.layout import plan_pages
from tierload.state import flatten

PAGE = 64 * 1024
RAW = Settings(compression="off", page_bytes=PAGE, pack_below_bytes=0, max_segment_size_mb=1)
CAP = 1e6  # bytes a second
BURST = 98304  # a tenth of a second at CAP, in whole blocks
SECONDS = 60.0  # for what has to happen sometime


def noise(pages: int, seed: int = 0) -> torch.Tensor:
    """Pages that are all different."""
    return torch.randint(0, 256, (pages * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"flush_interval_ms": -1}, "flush_interval_ms is -1; use whole milliseconds"),
        ({"flush_interval_ms": 2.5}, "flush_interval_ms is 2.5; use whole milliseconds"),
        ({"flush_interval_ms": 10**12}, "flush_interval_ms is 1000000000000"),
        ({"bandwidth_cap_mbps": -1}, "bandwidth_cap_mbps is -1; use megabytes a second"),
        ({"bandwidth_cap_mbps": 1e-9}, "at least 0.001, or 0 for no cap"),
        ({"bandwidth_cap_mbps": math.nan}, "bandwidth_cap_mbps is nan"),
        ({"bandwidth_cap_mbps": math.inf}, "bandwidth_cap_mbps is inf"),
    ],
)
def test_settings_that_make_no_sense(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**more)


def test_a_bucket_refuses_no_rate() -> None:
    with pytest.raises(tierload.InvalidRequest, match="at least 1"):
        _native.TokenBucket(0)


def test_the_report_counts_every_segment(tmp_path: Path) -> None:
    with tierload.Store(tmp_path / "s", mode="w", settings=RAW) as store:
        report = store.save({"w": noise(40)})
        assert report.pacing.segments == 3
        assert 0 < report.pacing.latency_ms_mean <= report.pacing.latency_ms_max
        assert report.pacing.late_segments == 0
        assert report.pacing.throttled_seconds == 0
        assert store.save({"w": noise(40)}).pacing == Pacing(0, 0.0, 0.0, 0, 0.0)  # nothing new


def test_the_cap_holds_over_all_saves_of_a_store(tmp_path: Path) -> None:
    settings = Settings(compression="off", page_bytes=4096, pack_below_bytes=0, bandwidth_cap_mbps=CAP / 1e6)
    with tierload.Store(tmp_path / "s", mode="w", settings=settings) as store:
        start = time.monotonic()
        written = [store.save({"w": noise(2, seed)[:BURST]}).written_bytes for seed in range(3)]
        assert written == [BURST] * 3
        assert time.monotonic() - start >= (sum(written) - BURST) / CAP  # a new bucket for each save would let all pass
        assert_alike(store.load(), {"w": noise(2, 2)[:BURST]})


def test_where_cap_and_interval_collide_late_segments_are_reported(tmp_path: Path) -> None:
    settings = Settings(
        compression="off", page_bytes=PAGE, pack_below_bytes=0, flush_interval_ms=20, bandwidth_cap_mbps=CAP / 1e6
    )
    state = {"w": noise(10)}
    with tierload.Store(tmp_path / "s", mode="w", settings=settings) as store:
        report = store.save(state)
        assert report.pacing.segments > 1  # one, but for the interval
        assert report.pacing.late_segments > 0
        assert report.pacing.latency_ms_max > 20
        assert report.pacing.throttled_seconds > 0
        assert report.seconds >= (report.written_bytes - BURST) / CAP
        assert_alike(store.load(), state)


class Writing(threading.Thread):
    """A native save in the background that the cap holds up until it is cancelled."""

    def __init__(self, store: tierload.Store) -> None:
        super().__init__()
        self.flat = flatten({"w": noise(64)})
        self.plan = plan_pages(self.flat, PAGE, 0)
        self.save = _native.Save(store._native)
        self.cancel = _native.Cancel()
        self.bucket = _native.TokenBucket(4096)
        self.error: TierloadError | None = None
        self.io_after: int | None = None

    def run(self) -> None:
        try:
            self.save.write(
                pages=page_set(self.plan),
                staging=None,
                parents=[],
                compression="off",
                device_rate=1e9,
                read_rate=0.0,
                threads=2,
                segment_bytes=1 << 20,
                flush_interval_ms=0,
                bucket=self.bucket,
                background=True,
                cancel=self.cancel,
                progress=None,
            )
        except TierloadError as error:
            self.error = error
        self.io_after = io_priority(threading.get_native_id())
        self.save.abort()


def nice_of(thread: int) -> int:
    """The nice value of a thread of this process."""
    text = Path(f"/proc/self/task/{thread}/stat").read_text()
    return int(text.rpartition(")")[2].split()[16])


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def io_priority(thread: int) -> int | None:
    """Class and level, or None where the number of the call is not known."""
    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    return None if number is None else int(ctypes.CDLL(None, use_errno=True).syscall(number, 1, thread))


def test_a_save_in_the_background_makes_room_and_is_cancelled(tmp_path: Path) -> None:
    with tierload.Store(tmp_path / "s", mode="w", settings=RAW) as store:
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        io_before = io_priority(threading.get_native_id())
        before = threads()
        writing = Writing(store)
        writing.start()
        try:
            deadline = time.monotonic() + SECONDS
            workers: set[int] = set()
            while len(workers) < 2 and time.monotonic() < deadline:  # back-pressure keeps both until it is cancelled
                others = threads() - before - {writing.native_id}
                workers = {thread for thread in others if nice_of(thread) == min(own + 10, 19)}
                time.sleep(0.01)
            assert len(workers) == 2
            assert writing.native_id is not None
            assert nice_of(writing.native_id) == own  # it takes the GIL later
            if io_before is not None:
                last = 2 << 13 | 7  # best effort
                for thread in (*workers, writing.native_id):
                    assert io_priority(thread) == last
        finally:
            writing.cancel.set()
            writing.join(SECONDS)
        assert writing.cancel.is_set
        assert isinstance(writing.error, SaveCancelled)
        assert "cancelled before it was committed" in str(writing.error)
        assert writing.io_after == io_before
        assert list((tmp_path / "s" / "seg").iterdir()) == []
        assert store.head() is None
        store.save({"w": 1})  # nothing is broken
        assert store.load() == {"w": 1}
