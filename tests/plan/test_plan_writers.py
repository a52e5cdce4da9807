from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierload.plan import Item, Part, assign_writers, explain, local_shape, replica
from tierload.types import Layout, Mesh

PAGE = 64


def plain(key: str, rows: int, row_bytes: int) -> Item:
    return Item(key, rows * row_bytes, rows, row_bytes)


def spread(key: str, shape: tuple[int, ...], layout: Layout) -> Item:
    return Item(key, 4 * prod(shape), shape[0], 4 * prod(shape[1:]), layout, shape)


def hsdp(copies: int, shards: int) -> Layout:
    return Layout(Mesh((copies, shards), tuple(range(copies * shards))), (None, 0))


@st.composite
def worlds(draw: st.DrawFn, with_spread: bool = True) -> tuple[list[Item], int, np.ndarray | None]:
    copies, shards = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks = copies * shards
    rows, row_bytes = st.integers(0, 60), st.sampled_from([1, 4, 24, 64, 100, 300])
    kinds = [st.builds(plain, st.just("w"), rows, row_bytes)]
    if with_spread:
        kinds.append(st.builds(lambda n: spread("s", (n, 3), hsdp(copies, shards)), rows))
    items = draw(st.lists(st.one_of(kinds), max_size=12))
    fixed = draw(st.none() | st.lists(st.integers(0, 5000), min_size=ranks, max_size=ranks).map(np.array))
    return items, ranks, fixed


alphas = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def bytes_per_rank(items: list[Item], ranks: int, fixed: np.ndarray | None, parts: list[tuple[Part, ...]]) -> list[int]:
    """What each rank writes, item by item and rank by rank."""
    found = [0] * ranks if fixed is None else fixed.tolist()
    for item, cut in zip(items, parts, strict=True):
        layout = item.replicas_of
        for part in cut:
            if layout is None:
                whole = part.end_row - part.begin_row == item.rows
                found[part.replica] += item.nbytes if whole else (part.end_row - part.begin_row) * item.row_bytes
                continue
            for rank in layout.mesh.ranks:
                if replica(layout, rank)[0] == part.replica:
                    found[rank] += 4 * prod(local_shape(item.shape, layout, rank))
    return found


@settings(deadline=None)
@given(worlds(), alphas)
def test_every_row_has_one_writer(world, alpha: float) -> None:
    items, ranks, fixed = world
    parts = assign_writers(items, ranks, fixed, PAGE, alpha)
    for item, cut in zip(items, parts, strict=True):
        assert cut[0].begin_row == 0
        assert cut[-1].end_row == item.rows
        assert all(a.end_row == b.begin_row and a.replica < b.replica for a, b in pairwise(cut))
        copies = ranks if item.replicas_of is None else replica(item.replicas_of, 0)[1]
        assert all(0 <= part.replica < copies for part in cut)
        assert len(cut) == 1 or all(part.begin_row < part.end_row for part in cut)


@settings(deadline=None)
@given(worlds(), alphas)
def test_every_rank_comes_to_the_same_plan_and_leaves_its_arguments_alone(world, alpha: float) -> None:
    items, ranks, fixed = world
    before = None if fixed is None else fixed.copy()
    first = assign_writers(items, ranks, fixed, PAGE, alpha)
    assert assign_writers(tuple(items), ranks, before, PAGE, alpha) == first
    assert fixed is None or (fixed == before).all()


@settings(deadline=None)
@given(worlds(), alphas)
def test_an_explanation_adds_up(world, alpha: float) -> None:
    items, ranks, fixed = world
    parts = assign_writers(items, ranks, fixed, PAGE, alpha)
    told = explain(items, ranks, fixed, PAGE, alpha)
    loads = bytes_per_rank(items, ranks, fixed, parts)
    assert told.nbytes.tolist() == loads
    extra = sum(len(cut) - 1 for cut in parts)
    assert told.after.communication == extra / max(len(items), 1)
    assert told.after.load == (pytest.approx(max(loads) * ranks / sum(loads)) if any(loads) else 1)
    if all(item.replicas_of is None for item in items):
        assert told.parts.tolist() == [
            sum(part.replica == rank for cut in parts for part in cut) for rank in range(ranks)
        ]


@settings(deadline=None)
@given(worlds(), alphas)
def test_moving_cuts_makes_nothing_worse(world, alpha: float) -> None:
    told = explain(*world, PAGE, alpha)
    assert told.after.objective <= told.before.objective
    assert told.after.load <= told.before.load
    assert told.after.communication <= told.before.communication


@settings(deadline=None)
@given(worlds(with_spread=False), alphas)
def test_no_rank_is_more_than_a_page_and_a_row_above_what_must_be(world, alpha: float) -> None:
    items, ranks, fixed = world
    loads = [0] * ranks if fixed is None else fixed.tolist()
    loads[0] += sum(item.nbytes for item in items if item.nbytes < PAGE)
    large = [item for item in items if item.nbytes >= PAGE]
    nbytes, level = sum(item.nbytes for item in large), 0
    while sum(max(level - load, 0) for load in loads) < nbytes:
        level += 1
    granule = PAGE + max((item.row_bytes for item in large), default=0)
    assert explain(items, ranks, fixed, PAGE, alpha).nbytes.max() <= max(level, *loads) + granule


@settings(deadline=None)
@given(worlds(with_spread=False), alphas)
def test_no_plan_is_heavier_than_equal_runs_cut_in_the_same_way(world, alpha: float) -> None:
    items, ranks, _ = world
    items = [item for item in items if item.nbytes >= PAGE]
    bounds = np.cumsum([0, *(item.nbytes for item in items)]).tolist()
    cuts = [0]
    for rank in range(1, ranks):
        ideal = bounds[-1] * rank // ranks + min(rank, bounds[-1] % ranks) - (bounds[-1] % ranks * rank // ranks)
        item = next((n for n in range(len(items)) if ideal < bounds[n + 1]), None)
        if item is None:
            cuts.append(bounds[-1])
            continue
        row, within = items[item].row_bytes, ideal - bounds[item]
        if row < PAGE:
            within = (within + PAGE // 2) // PAGE * PAGE
        cuts.append(bounds[item] + min((within + row // 2) // row, items[item].rows) * row)
    cuts.append(bounds[-1])
    heaviest = max(end - begin for begin, end in pairwise(cuts))
    assert explain(items, ranks, None, PAGE, alpha).nbytes.max() <= heaviest


def test_what_is_smaller_than_a_page_is_written_by_the_first_rank() -> None:
    items = [plain("a", 60, 1), plain("b", 640, 1), plain("c", 1, 8), plain("d", 0, 4)]
    parts = assign_writers(items, 4, np.array([900, 0, 0, 0]), PAGE, 0.0)
    assert parts[0] == (Part(0, 60, 0),)
    assert parts[2] == (Part(0, 1, 0),)
    assert parts[3] == (Part(0, 0, 0),)
    assert {part.replica for part in parts[1]} == {1, 2, 3}


def test_a_large_tensor_is_cut_at_page_boundaries() -> None:
    (cut,) = assign_writers([plain("w", 100 * PAGE // 4, 4)], 3, None, PAGE, 0.1)
    assert [part.begin_row * 4 % PAGE for part in cut] == [0, 0, 0]
    assert [part.end_row * 4 // PAGE for part in cut] == [33, 67, 100]


def test_a_cut_goes_to_where_an_item_begins_where_that_costs_nothing() -> None:
    items = [plain("a", 10, PAGE), plain("b", 10, PAGE)]
    fixed = np.array([100 * PAGE, 0, PAGE])  # whatever the others take, the first rank is the last to be done
    told = explain(items, 3, fixed, PAGE, 0.5)
    assert assign_writers(items, 3, fixed, PAGE, 0.5) == [(Part(0, 10, 1),), (Part(0, 10, 2),)]
    assert (told.before.communication, told.after.communication) == (0.5, 0)
    assert told.before.load == told.after.load


def test_what_does_not_divide_is_spread_over_the_ranks() -> None:
    assert explain([plain("w", 11, 1)], 4, None, 1, 0.0).nbytes.tolist() == [3, 3, 3, 2]


def test_ranks_that_have_enough_to_do_get_nothing() -> None:
    (cut,) = assign_writers([plain("w", 400, 16)], 4, np.array([10_000, 0, 10_000, 0]), PAGE, 0.0)
    assert [part.replica for part in cut] == [1, 3]


def test_copies_take_turns_by_what_their_ranks_have() -> None:
    items = [spread("a", (10, 4), hsdp(2, 2)), spread("b", (40, 4), hsdp(2, 2)), spread("c", (32, 4), hsdp(2, 2))]
    assert assign_writers(items, 4, None, PAGE, 0.1) == [(Part(0, 10, 1),), (Part(0, 40, 0),), (Part(0, 32, 1),)]
    busy = np.array([0, 5000, 0, 0])  # the heaviest rank of a copy counts
    assert [cut[0].replica for cut in assign_writers(items, 4, busy, PAGE, 0.1)] == [1, 1, 1]
    assert assign_writers(items[:1], 4, np.array([300, 300, 500, 0]), PAGE, 0.1) == [(Part(0, 10, 0),)]


def test_a_shard_that_only_one_rank_of_a_copy_has_counts_for_that_rank() -> None:
    layout = hsdp(2, 2)
    items = [spread("a", (1, 100), layout), spread("b", (1, 90), layout), spread("c", (1, 10), layout)]
    told = explain(items, 4, None, PAGE, 0.1)
    assert told.nbytes.tolist() == [400, 0, 400, 0]
    assert told.parts.tolist() == [1, 0, 2, 0]


def test_a_spread_tensor_comes_before_what_evens_the_ranks_out() -> None:
    items = [plain("a", 2400, 1), spread("b", (200, 1), hsdp(2, 1))]
    told = explain(items, 2, None, PAGE, 0.0)
    assert abs(int(told.nbytes[0]) - int(told.nbytes[1])) <= 2 * PAGE
    assert told.nbytes.sum() == 3200


def test_ten_thousand_ranks_share_one_tensor() -> None:
    (cut,) = assign_writers([plain("w", 1 << 20, 1 << 10)], 10_000, None, 1 << 12, 0.1)
    assert len(cut) == 10_000
    assert explain([plain("w", 1 << 20, 1 << 10)], 10_000, None, 1 << 12, 0.1).after.load < 1.2
