"""Ranks that load together: which of them are on one node, and how these speak. It is found out once a job."""

from __future__ import annotations

import atexit
import json
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from tierload.engine.job import place
from tierload.engine.loading import Source, fill
from tierload.engine.sharing import fill_together, refuse
from tierload.ranks import Channel
from tierload.settings import Settings
from tierload.state import LoadPlan

__all__ = ["Company", "company_of"]

_ID_BYTES = 16

_made: dict[tuple[int, ...], Company] = {}  # of the job whose key-value store `_store` is
_store: object = None


def company_of(settings: Settings, together: bool | None, holders: set[tuple[int, ...]]) -> Company | None:
    """The ranks that this one loads with; None when it reads by itself.

    ``together``: as ``Store.load`` has it. ``holders`` are the ranks that hold the spread tensors of the target.
    """
    global _store
    rank, ranks = place()
    if ranks == 1 or together is False:
        return None
    everybody = tuple(range(ranks))
    if together or everybody in holders:
        members = everybody
    elif len(holders) == 1:
        (members,) = holders
    else:
        return None
    if rank not in members or len(members) == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    if store is not _store:
        _store = store
        _made.clear()
    if members not in _made:
        _made[members] = Company(store, members, rank, settings.rank_timeout_seconds)
    return _made[members]


class Company:
    """``members`` of a job, ascending, each of which makes the same calls in the same order."""

    def __init__(self, store: Any, members: tuple[int, ...], rank: int, limit_seconds: float) -> None:
        self._store = store
        self._members = members
        self._rank = rank
        self._limit = limit_seconds
        self._neighbours: Sequence[int] | None = None
        named = blake2b(np.array(members, np.int64).tobytes(), digest_size=_ID_BYTES).hexdigest()
        self._name = f"load/{named}"
        self._all = self._channel(self._name, members)
        self._here: Channel | None = None  # the channel of those on this node
        self._turn = threading.Lock()  # the rounds of two loads must not mix

    def fill(self, source: Source, plan: LoadPlan, threads: int) -> None:
        """As ``loading.fill``, with the ranks on this node.

        Raises:
            CorruptPage, TierloadError: What went wrong first on one of them.
            RankLost: One has ended, or gives no sign of life.
        """
        with self._turn:
            self._meet(None)
            if self._here is None:
                fill(source, plan, threads, self._rank)
            else:
                fill_together(self._here, source, plan, threads, self._rank)

    def refuse(self, error: BaseException) -> None:
        """Tells the others why this rank cannot load.

        Raises:
            BaseException: ``error``, or what went wrong before it on another rank.
        """
        with self._turn:
            self._meet(error)
            if self._here is not None:
                refuse(self._here, error)

    def close(self) -> None:
        """Before the process ends: what it said last has to be heard."""
        for channel in (self._all, self._here):
            if channel is not None:
                channel.close()

    def _meet(self, error: BaseException | None) -> None:
        """Finds out who is on this node."""
        if self._neighbours is not None:
            return
        self._all.begin()
        answer = self._all.round("looking for the ranks of each node", error or _node(), _numbered)
        nodes = np.frombuffer(zlib.decompress(answer), np.uint32)
        own = nodes[self._members.index(self._rank)]
        neighbours = np.array(self._members)[nodes == own].tolist()
        if len(neighbours) > 1:
            self._here = self._channel(f"{self._name}/{own}", neighbours)
        self._neighbours = neighbours

    def _channel(self, name: str, members: Sequence[int]) -> Channel:
        return Channel(
            self._store,
            members.index(self._rank),
            len(members),
            name=name,
            limit_seconds=self._limit,
            members=members,
            call="load",
        )


def _node() -> bytes:
    """Equal for processes that see one another: of one boot of a machine, and one namespace of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    text = json.dumps([os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")])
    return blake2b(text.encode(), digest_size=_ID_BYTES).digest()


def _numbered(nodes: Iterable[bytes]) -> bytes:
    """The number of each rank's node, in the order in which they come: a few hundred bytes for ten thousand ranks."""
    numbers: defaultdict[bytes, int] = defaultdict(lambda: len(numbers))
    return zlib.compress(np.array([numbers[node] for node in nodes], np.uint32).tobytes())


@atexit.register
def _close_all() -> None:
    for company in _made.values():
        company.close()


os.register_at_fork(after_in_child=_made.clear)
