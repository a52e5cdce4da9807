"""This process as one rank of a torch.distributed job: who it is, and how all ranks come to write into one store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tierload import _native
from tierload.errors import InvalidRequest, RanksDisagree
from tierload.ranks import Channel
from tierload.settings import Settings

__all__ = ["Job", "place", "saves_together"]

_opened = 0  # stores that all ranks of this job have opened: each has a channel of its own


def place() -> tuple[int, int]:
    """The rank of this process, and how many there are: 0 of 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def saves_together(settings: Settings) -> bool:
    """Whether all ranks take part in a save by this process."""
    return place()[1] > 1 and settings.ranks == "all"


@dataclass(slots=True)
class Job:
    """The ranks that save into one store together. Nothing here is a collective of the training: they speak over the
    key-value store of torch.distributed, on a connection of their own."""

    rank: int
    ranks: int
    channel: Channel
    failed: bool = False  # the last save: the next one begins with a new epoch on all ranks

    @staticmethod
    def of(settings: Settings) -> Job | None:
        """The job that this process is a rank of; None when it saves by itself."""
        global _opened
        if not saves_together(settings):
            return None
        rank, ranks = place()
        _opened += 1
        store: Any = dist.distributed_c10d._get_default_store()  # typed without clone()
        name = f"tierload/{_opened}"
        return Job(rank, ranks, Channel(store, rank, ranks, name=name, limit_seconds=settings.rank_timeout_seconds))

    def open(self, path: str, open_native: Callable[[bool], _native.Store]) -> _native.Store:
        """Opens the store on all ranks: rank 0 holds it, the others read. ``open_native`` is told whether to write.

        Raises:
            RanksDisagree: They were given different paths.
            InvalidRequest: The path is not the same directory on all of them.
            StoreBusy, ...: Rank 0 cannot have it; every rank raises it.
        """
        self.channel.begin()
        here: list[_native.Store] = []
        known = _native.super_of(path)
        mine = {"path": os.path.realpath(path), "store": known[0].hex() if known else ""}

        def lead(parts: list[bytes]) -> bytes:
            _compare([json.loads(part) for part in parts])
            here.append(open_native(True))
            return json.dumps([here[0].id.hex(), here[0].epoch]).encode()

        try:
            answer = json.loads(self.channel.round("opening the store", json.dumps(mine).encode(), lead))
            self.channel.round("looking at the store", self._look(path, answer), lambda parts: b"")
        except BaseException:
            for native in here:
                native.close()
            raise
        return here[0] if here else open_native(False)

    def _look(self, path: str, answer: list[object]) -> bytes | InvalidRequest:
        seen = _native.super_of(path)
        if seen is not None and [seen[0].hex(), seen[1]] == answer:
            return b""
        what = "no store" if seen is None else f"store {seen[0].hex()[:12]} of epoch {seen[1]}"
        return InvalidRequest(
            f"{os.path.realpath(path)} is not the directory that rank 0 has opened under this name: there is {what}. "
            "All ranks have to save into one directory that they share, such as one on a network file system"
        )


def _compare(places: list[dict[str, str]]) -> None:
    """The same path, or the same store under other names."""
    first = places[0]
    different = [
        f"rank {rank} saves into {there['path']}, and rank 0 into {first['path']}"
        for rank, there in enumerate(places)
        if there["path"] != first["path"] and not (first["store"] and there["store"] == first["store"])
    ]
    if different:
        raise RanksDisagree("the ranks of this job save into different directories", differences=different)
