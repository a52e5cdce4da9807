"""Ten thousand ranks: what rank 0 does in a save, from the description of its state to the commit; and one of them in a
load."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

import tierload
from bench.measuring import Figure, Result, Task, interleave
from tierload.engine import Store
from tierload.engine.job import Job
from tierload.engine.saving import Effort
from tierload.engine.shards import Shards
from tierload.plan import local_boxes
from tierload.types import FlatState, Layout, Mesh, Sharded

_MIB = 1 << 20
_SETTINGS = tierload.Settings(compression="off")


class _Others:
    """The channel of rank 0, with the answers of all other ranks: they agree, and each has written its shard."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.attempt: tuple[int, int] = (0, 0)
        self.seconds = 0.0

    def begin(self) -> None:
        self.seconds = 0.0

    def close(self) -> None:
        """Nobody waits."""

    def post(self, what: str, data: bytes) -> None:
        """Nobody reads."""

    def working(self, what: str, progress: Callable[[], int]) -> nullcontext[None]:
        return nullcontext()

    def round(self, what: str, mine: bytes | BaseException, decide: Callable[[list[bytes]], bytes]) -> bytes:
        if isinstance(mine, BaseException):
            raise mine
        if what == "describing the state":
            parts = [mine] * self.ranks
        else:
            row, totals = mine[:64], mine[64:]
            parts = [struct.pack("<I", rank) + row[4:] + totals for rank in range(self.ranks)]
        began = time.perf_counter()
        answer = decide(parts)
        self.seconds += time.perf_counter() - began
        if what == "describing the state":
            told = json.loads(answer)
            self.attempt = told["epoch"], told["txid"]
        return answer


class _RankZero(Store):
    """The store of rank 0, whose state is a part of one that is spread over very many ranks."""

    others: _Others
    layout: Layout

    def draft(self, state: object):
        draft = self._draft(state, None, None, (), "", allow_pickle=False, heat=None)
        return replace(draft, flat=_spread(draft.flat, self.layout))


def _spread(flat: FlatState, layout: Layout) -> FlatState:
    ranks = len(layout.mesh.ranks)
    wholes = {
        number: Sharded((ranks * info.shape[0], *info.shape[1:]), layout)
        for number, info in enumerate(flat.chunks.infos())
        if info.key.startswith("spread/")
    }
    return replace(flat, sharded=wholes)


def test_commit_of_ten_thousand_ranks(benchmark, scale, folder, keep):
    ranks, tensors = scale.of(10_000, 12), scale.of(1000, 10)
    result = Result(
        "ranks-commit",
        f"A commit by {ranks:,} ranks",
        f"{tensors:,} tensors: two thirds of them spread over all ranks (Shard(0)), the others the same on all ranks, "
        "1 MiB each in all. `save` is everything that rank 0 does: it describes and digests its state, compares the "
        "answers of all ranks, plans who writes what, writes its own part and the root, and commits; `rank 0's work on "
        "others` is what of that grows with the ranks. The other ranks' answers are made up, so no network is in it. "
        "`plan of a load` is what one of the ranks does until it knows where its bytes are: the root, rank 0's "
        "document and shard, its own shard. Memory is the peak of tracemalloc, in runs of their own.",
        folder,
    )
    layout = Layout(Mesh((ranks,), tuple(range(ranks))), (0,))
    spread = {f"{n:04}": torch.randn(2, 512) for n in range(tensors * 2 // 3)}
    same = {f"{n:04}": torch.randn(64, 4096) for n in range(scale.of(tensors - len(spread), 2))}
    state = {"spread": spread, "same": same}
    store = _RankZero(folder / "store", mode="w", settings=_SETTINGS)
    store.others, store.layout = _Others(ranks), layout
    store._job = Job(0, ranks, store.others)  # type: ignore[arg-type]
    on_others: list[float] = []

    def save() -> None:
        store.write_draft(draft, Effort(began=time.perf_counter()), _SETTINGS)
        on_others.append(store.others.seconds)

    def change() -> None:
        for tensor in spread.values():
            tensor += 1

    def plan() -> None:
        head = store.find()
        shards = Shards(head, lambda rank: store._native.manifest(head.txid, 0), rank=0, ranks=ranks)
        for number, tensor in enumerate(shards.whole.tensors):
            if tensor.layout is not None:
                box = next(iter(local_boxes(tensor.shape, tensor.layout, 0))).box
                assert [rank for rank, _, _ in shards.pieces(number, box)] == [0]

    draft = store.draft(state)
    save()
    samples = interleave(
        benchmark, {"save": Task(save, before=change), "plan of a load": Task(plan)}, rounds=scale.of(7, 1)
    )
    peaks = {}
    for name, run in (("save", save), ("plan of a load", plan)):
        change()
        tracemalloc.start()
        run()
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    result.samples = samples
    result.add(Figure.milliseconds("a save, on rank 0", result.samples, "save", limit=1000))
    others = [seconds * 1e3 for seconds in on_others[1 : 1 + len(samples["save"])]]
    result.add(Figure.of("rank 0's work on others", others, "ms"))
    result.add(Figure("memory of a save, at its peak", peaks["save"] / _MIB, "MiB", limit=64))
    result.add(Figure.milliseconds("plan of a load", result.samples, "plan of a load", limit=500))
    result.add(Figure("memory of that plan, at its peak", peaks["plan of a load"] / _MIB, "MiB"))
    assert store.find().ranks == ranks
    store.close()
    keep(result)
