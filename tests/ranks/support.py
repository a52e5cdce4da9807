"""Ranks that are threads of this process, for what does not need real ones; and what ranks do in the tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tierload.errors import RankLost, TierloadError
from tierload.ranks import Channel

LIMIT = 1.2
Body = Callable[[Channel], Any]


def in_threads(
    ranks: int, body: Body, *, store: dist.Store | None = None, name: str = "run", limit: float = 20.0
) -> list[Any]:
    """What ``body`` returned, or raised, on each rank."""
    shared = dist.HashStore() if store is None else store
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = body(Channel(shared, rank, ranks, name=name, limit_seconds=limit))
        except BaseException as error:  # noqa: BLE001 it is what the test asks for
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return found


def joined(parts: list[bytes]) -> bytes:
    """What rank 0 decides in these tests."""
    return b",".join(parts)


def shared() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def channel_of(rank: int, ranks: int, limit: float = 60.0) -> Channel:
    return Channel(shared(), rank, ranks, name="run", limit_seconds=limit)


def a_save(channel: Channel, word: bytes = b"") -> bytes:
    channel.begin()
    channel.round("describe", word, joined)
    return channel.round("commit", word, joined)


def said(channel: Channel, word: bytes = b"") -> Any:
    """What a save returned, or the kind of error, the ranks that it names, and its message."""
    try:
        return a_save(channel, word)
    except RankLost as error:
        return error.ranks, str(error)
    except TierloadError as error:
        return type(error).__name__, str(error)
