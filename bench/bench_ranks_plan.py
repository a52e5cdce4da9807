"""Ten thousand ranks: what it costs to say who writes what, and for one rank of another world where its parts are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from math import prod

from bench.measuring import CPU, Figure, Result, Task, interleave
from tierload.plan import Item, LocalBox, Part, assign_writers, copies, explain, holders, local_boxes, local_shape
from tierload.types import Box, Layout, Mesh, Placement

_MIB = 1 << 20
_ITEM_BYTES = 2
_ALPHA = 0.1


def test_ranks_plan(benchmark, scale, folder, keep):
    ranks, others, tensors = scale.of(10_000, 8), scale.of(9_000, 6), scale.of(1000, 10)
    result = Result(
        "ranks-plan",
        f"{tensors:,} tensors of {ranks:,} ranks",
        f"Matrices of bfloat16 with 4096 columns, no two of one shape. `writers` is who writes what of them, as the "
        f"coordinator of {ranks:,} ranks plans it; `load` is where one rank of {others:,}, over which they are spread "
        "(a plain one is whole), finds its bytes. FSDP: Shard(0) over all; HSDP: over half, two copies; plain: the "
        "same on all ranks. Nothing is kept from one round to the next. Memory is the peak of tracemalloc, in a run of "
        "its own.",
        folder,
    )
    shapes = [(50_000 + 7 * number, 4096) for number in range(tensors)]
    everybody, half = Mesh((ranks,), tuple(range(ranks))), Mesh((2, ranks // 2), tuple(range(ranks)))
    other = Layout(Mesh((others,), tuple(range(others))), (0,))
    tasks: dict[str, Callable[[], object]] = {}
    for name, mesh, placements in (("FSDP", everybody, (0,)), ("HSDP", half, (None, 0)), ("plain", None, ())):
        items = list(_items(shapes, mesh, placements))
        parts = assign_writers(items, ranks, None, _MIB, _ALPHA)
        tasks[f"writers, {name}"] = lambda items=items: assign_writers(items, ranks, None, _MIB, _ALPHA)
        tasks[f"load, {name}"] = lambda items=items, parts=parts: list(_reads(items, parts, other, others // 2))
        load = explain(items, ranks, None, _MIB, _ALPHA).after.load
        result.add(Figure(f"{name}: the heaviest rank's bytes over the mean", load, ""))

    def forget() -> None:
        holders.cache_clear()
        local_boxes.cache_clear()

    result.samples = interleave(
        benchmark, {name: Task(run, before=forget) for name, run in tasks.items()}, rounds=scale.of(7, 1)
    )
    for name, run in tasks.items():
        forget()
        result.add(Figure.milliseconds(name, result.samples, name, limit=500))
        result.add(Figure(f"{name}: memory", _peak(run) / _MIB, "MiB"))
    for name, run in tasks.items():
        if name.startswith("load"):
            wanted = [shape if "plain" in name else local_shape(shape, other, others // 2) for shape in shapes]
            found = [sum(int(lengths.sum()) for _, _, lengths in runs) for runs in run()]
            assert found == [prod(shape) * _ITEM_BYTES for shape in wanted]
    assert all(name.endswith(CPU) or len(values) for name, values in result.samples.items())
    keep(result)


def _items(shapes: list[tuple[int, int]], mesh: Mesh | None, placements: tuple[Placement, ...]) -> Iterator[Item]:
    layout = None if mesh is None else Layout(mesh, placements)
    for number, shape in enumerate(shapes):
        rows, row_bytes = shape[0], prod(shape[1:]) * _ITEM_BYTES
        yield Item(f"layer.{number:04}", rows * row_bytes, rows, row_bytes, layout, shape)


def _reads(items: list[Item], parts: list[tuple[Part, ...]], layout: Layout, rank: int) -> Iterator[list]:
    """The runs of bytes of each tensor that a rank reads."""
    for item, written in zip(items, parts, strict=True):
        strides = (item.row_bytes, _ITEM_BYTES)
        if item.replicas_of is None:
            whole = LocalBox(Box((0, 0), item.shape), (0, 0))
            rows = [(part.begin_row, part.end_row - part.begin_row) for part in written]
            boxes = [Box((begin, 0), (count, item.shape[1])) for begin, count in rows]
            yield [copies(box, whole, strides, _ITEM_BYTES) for box in boxes]
            continue
        yield [
            copies(held, wanted, strides, _ITEM_BYTES)
            for wanted in local_boxes(item.shape, layout, rank)
            for _, held in holders(item.shape, item.replicas_of, written[0].replica, wanted.box)
        ]


def _peak(run: Callable[[], object]) -> int:
    """The most bytes that Python and numpy had at once for it."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
