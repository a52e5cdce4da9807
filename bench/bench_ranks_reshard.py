"""Several ranks on one node: what resharding reads and needs of memory, and how long a save by all of them takes."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Shard

import tierload
from bench.measuring import CPU, Figure, Result, median, ratios
from bench.spread import Way, durable_times, read_back, save_once
from tests.ranks.world import results
from tierload.engine import devices
from tierload.engine.loading import table_of

_MIB = 1 << 20
_LIMIT_S = 500.0
_ROW_BYTES = 4096 * 2

_WAYS: dict[str, tuple[Way, Way]] = {
    "4 to 3": (((4,), [Shard(0)]), ((3,), [Shard(0)])),
    "2x2 to 8": (((2, 2), [Shard(0), Shard(1)]), ((8,), [Shard(0)])),
}


def _count(way: Way) -> int:
    ranks = 1
    for size in way[0]:
        ranks *= size
    return ranks


@pytest.mark.slow  # even at toy size: eight ranks
def test_reshard(benchmark, scale, folder, keep):
    tensors, rows, rounds = scale.of(32, 4), scale.of(1000, 40), scale.of(3, 1)
    nbytes = sum((rows + n) * _ROW_BYTES for n in range(tensors))
    result = Result(
        "ranks-reshard",
        f"Resharding {nbytes / _MIB:,.0f} MiB on one node",
        f"{tensors} matrices of bfloat16 with 4096 columns, random, saved by all ranks of one mesh and loaded by those "
        "of another (gloo, processes of one machine), cold each time: taken out of the page cache. Bytes read: "
        "`read_bytes` of /proc/self/io, of all ranks together, over the bytes that the commit has in segments. Memory: "
        "VmHWM less VmRSS before, of the rank that grew the most, the pages that ranks share included; the target is "
        "there before. *Alone*: `together=False`, every rank reads what it needs by itself.",
        folder,
    )

    def measure() -> None:
        for name, (before, after) in _WAYS.items():
            path = str(folder / name)
            results(_count(before), save_once, path, before, tensors, rows, limit=_LIMIT_S)
            stored = _stored(path)
            for together in (True, False):
                told = f"{name}, {'together' if together else 'alone'}"
                arguments = (path, after, tensors, rows, together, rounds)
                found = list(zip(*results(_count(after), read_back, *arguments, limit=_LIMIT_S), strict=True))
                read = [sum(one[0] for one in ranks) / stored for ranks in found]
                memory = [max(one[1] for one in ranks) / _MIB for ranks in found]
                seconds = [max(one[2] for one in ranks) for ranks in found]
                result.samples[told] = seconds
                limits = (1.05, 256.0) if together else (None, None)
                result.add(Figure.of(f"{told}: bytes read ÷ bytes stored", read, "", limit=limits[0]))
                result.add(Figure.of(f"{told}: memory of a rank", memory, "MiB", limit=limits[1]))
                result.add(Figure.of(f"{told}: cold load", seconds, "s"))

    benchmark.pedantic(measure, rounds=1)
    keep(result)


def _stored(path: str) -> int:
    with tierload.open(path) as store:
        head = store.head()
        assert head is not None
        return sum(table_of(store._manifest(head, rank)).stored_bytes() for rank in range(head.ranks))


def test_durable(benchmark, scale, folder, keep):
    tensors, rows, rounds, ranks = scale.of(32, 4), scale.of(1000, 40), scale.of(9, 1), 4
    nbytes = sum((rows + n) * _ROW_BYTES for n in range(tensors))
    result = Result(
        "ranks-durable",
        f"{nbytes / _MIB:,.0f} MiB by {ranks} ranks, and by one",
        "Seconds until the commit is durable, in turn, on one disk, each into a store of its own that was made just "
        "before and is removed afterwards; other random bfloat16 numbers each time. All: every rank saves its quarter. "
        "One: rank 0 saves as many bytes by itself while the others wait. Both may use all cores. CPU: of all ranks.",
        folder,
    )
    devices.calibrate(folder)

    def measure() -> None:
        every = results(ranks, durable_times, str(folder), tensors, rows, rounds, limit=_LIMIT_S)
        for name in every[0]:
            by_round = list(zip(*(found[name] for found in every), strict=True))
            result.samples[name] = [max(seconds for seconds, _ in times) for times in by_round]
            result.samples[f"{name}{CPU}"] = [sum(cpu for _, cpu in times) for times in by_round]

    benchmark.pedantic(measure, rounds=1)
    for call in ("save", "async_save"):
        for who in ("all", "one"):
            result.add(Figure.milliseconds(f"{call}, {who}", result.samples, f"{call}, {who}"))
        for kind in ("", CPU):
            pair = result.samples[f"{call}, all{kind}"], result.samples[f"{call}, one{kind}"]
            limit = None if kind else 1.1
            ratio = median(pair[0]) / median(pair[1])
            result.add(Figure(f"{call}: all ÷ one{kind}, of medians", ratio, "", limit=limit))
            result.add(Figure.of(f"{call}: all ÷ one{kind}, round by round", ratios(*pair), ""))
    keep(result)
