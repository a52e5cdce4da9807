"""What rank 0 does in one round of very many ranks."""

from __future__ import annotations

import tracemalloc

import torch.distributed as dist

from bench.measuring import Figure, Result, Task, interleave
from tierload.ranks import Channel
from tierload.ranks.board import Board
from tierload.ranks.life import Life
from tierload.ranks.watch import Watch

_MESSAGE = 120
_NAME = "bench"


class _Others:
    """All ranks but rank 0: what they have written into the key-value store when rank 0 comes."""

    def __init__(self, store: dist.Store, ranks: int) -> None:
        self.board = Board(store, _NAME, 60.0)
        self.ranks = ranks
        self.save = 0
        self.life = Life.of_this_process()

    def hand_in(self) -> None:
        """Their parts of the first round of the next save; they are still on their way, as far as anybody was told."""
        self.save += 1
        part = f"1.{self.save}.0 describe\n".encode() + bytes(_MESSAGE)
        for rank in range(1, self.ranks):
            self.board.write(f"part/{rank}", part)
        self.board.add(f"state/1.{self.save}.0", self.ranks - 1)

    def live(self) -> None:
        """A new sign of life of each."""
        life = Life(self.life.host, self.life.pid, self.life.started, "elsewhere", (1, self.save + 1, 0))
        for rank in range(1, self.ranks):
            self.board.write(f"life/{rank}", life.to_json().replace(b'"beats": 0', b'"beats": %d' % self.save))


def test_ten_thousand_ranks(benchmark, scale, folder, keep):
    ranks = scale.of(10_000, 50)
    result = Result(
        "ranks-round",
        f"One round of {ranks:,} ranks",
        f"Messages of {_MESSAGE} bytes lie in a TCPStore of this process, as {ranks - 1:,} ranks would have put them "
        "there; rank 0 gathers them, decides (it counts their bytes) and answers. `who lives` is what rank 0 does once "
        "a second while it waits: it reads a new sign of life of every rank.",
        folder,
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = _Others(store, ranks)
    channel = Channel(store, 0, ranks, name=_NAME, limit_seconds=60.0)
    watch = Watch(others.board, range(1, ranks), 60.0, range(ranks), "save")

    def prepare() -> None:
        others.hand_in()
        channel.begin()

    def count(parts: list[bytes]) -> bytes:
        return b"%d" % sum(map(len, parts))

    def one_round() -> None:
        assert channel.round("describe", bytes(_MESSAGE), count) == b"%d" % (_MESSAGE * ranks)

    def look() -> None:
        assert watch.look((1, others.save + 1, 0), "describe", for_arrival=True) is None

    watch.begin()
    samples = interleave(
        benchmark,
        {"round": Task(one_round, before=prepare), "who lives": Task(look, before=others.live)},
        rounds=scale.of(7, 1),
    )
    prepare()
    tracemalloc.start()
    one_round()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    result.samples = samples
    result.add(Figure.milliseconds("gather, decide, answer", samples, "round"))
    result.add(Figure.milliseconds("who lives", samples, "who lives"))
    result.add(Figure("memory of a round, at its peak", peak / (1 << 20), "MiB"))
    keep(result)
