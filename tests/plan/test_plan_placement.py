from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_tables import PAGE, Piece, Stored

from tierload.layout import place_pages
from tierload.types import HeatTable

# Packed chunks of two pages and more, chunks of several pages, and parts of one tensor.
STORED = Stored(
    [
        *(Piece.whole(f"bias.{n}", 900) for n in range(9)),
        Piece.whole("a", 3 * PAGE + 5),
        Piece.whole("b", PAGE),
        Piece.whole("c", 2 * PAGE),
        Piece.whole("d", 7 * PAGE),
        Piece.rows("rows", (100, 200), 0, 33),
        Piece.rows("rows", (100, 200), 33, 100),
    ]
)
KEYS = ["a", "b", "c", "d", "rows", *(f"bias.{n}" for n in range(9)), "of another state"]
TENSOR_PAGES = {"a": 4, "c": 2, "d": 7, "rows": 5}
SIZES = [len(page) for page in STORED.pages]
LEVELS = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def table_of(keys: list[str], heats: list[float], uses: list[int], pages: dict[str, list[float]]) -> HeatTable:
    column = np.array(heats, np.float32)
    by_page = {key: np.array(values, np.float32) for key, values in pages.items()}
    return HeatTable(tuple(keys), column, column, column, column, np.array(uses, np.int32), by_page)


@st.composite
def tables(draw: st.DrawFn) -> HeatTable:
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True))
    uses = draw(st.lists(st.integers(-1, 4), min_size=len(keys), max_size=len(keys)))
    heats = draw(st.lists(LEVELS, min_size=len(keys), max_size=len(keys)))
    pages = {key: draw(st.lists(LEVELS, min_size=n, max_size=n)) for key, n in TENSOR_PAGES.items() if key in keys}
    return table_of(keys, heats, uses, pages)


def uses_of(table: HeatTable) -> list[float]:
    """When each page is first used, of what the chunks in it say; never: infinity."""
    known = {key: use if use >= 0 else np.inf for key, use in zip(table.keys, table.first_use.tolist(), strict=True)}
    found = [np.inf] * len(STORED.pages)
    for row, info in zip(STORED.plan.rows, STORED.plan.chunks.infos(), strict=True):
        for page in range(row["first_page"], row["first_page"] + row["pages"]):
            found[page] = min(found[page], known.get(info.key, np.inf))
    return found


@settings(deadline=None, max_examples=100)
@given(tables(), st.integers(0, sum(SIZES) + PAGE))
def test_every_page_has_one_place_hot_ones_the_first_within_their_budget(table: HeatTable, budget: int) -> None:
    placed = place_pages(STORED.plan, table, budget)
    order, uses = placed.order.tolist(), uses_of(table)
    assert sorted(order) == list(range(len(SIZES)))
    hot, others = order[: placed.hot], order[placed.hot :]
    assert sum(SIZES[page] for page in hot) <= (budget or sum(SIZES) // 4)
    coldest = min((placed.heats[page] for page in hot), default=0)
    assert all(placed.heats[page] > 0 for page in hot)
    assert all(placed.heats[page] <= coldest for page in others) or not hot
    used, rest = [page for page in others if uses[page] < np.inf], [page for page in others if uses[page] == np.inf]
    assert others == used + rest
    for group in (hot, used):
        assert group == sorted(group, key=lambda page: (uses[page], page))
    assert rest == sorted(rest)


def test_a_budget_is_used_up_by_the_hottest_pages_and_by_page() -> None:
    heat = {"d": [0.1, 0.9, 0.1, 0.8, 0.2, 0.1, 0.1], "c": [0.85, 0.15]}
    placed = place_pages(STORED.plan, table_of(["c", "d", "b"], [0.9, 0.9, 0.5], [2, 1, 0], heat), 4 * PAGE)
    keys = STORED.plan.chunks.keys_at(range(len(STORED.data)))
    b, c, d = (int(STORED.plan.rows["first_page"][keys.index(key)]) for key in "bcd")
    assert placed.hot == 4
    assert placed.order[:4].tolist() == [b, d + 1, d + 3, c]
    assert placed.order[4:11].tolist() == [d, d + 2, d + 4, d + 5, d + 6, c + 1, 0]


def test_without_any_heat_pages_stay_as_they_are_planned() -> None:
    placed = place_pages(STORED.plan, table_of([], [], [], {}), 0)
    assert placed.order.tolist() == list(range(len(SIZES)))
    assert placed.hot == 0
    empty = place_pages(Stored([]).plan, table_of(["a"], [1.0], [0], {}), 0)
    assert (empty.order.tolist(), empty.hot) == ([], 0)
