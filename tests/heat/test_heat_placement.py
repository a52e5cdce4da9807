"""Placement by heat: where pages lie in segments, how hot ones are stored, and that it decides nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierload
from tests.ranks.world import results
from tierload import Settings, _native
from tierload.engine import devices
from tierload.engine.loading import table_of
from tierload.engine.memory import Arenas
from tierload.heat import HeatMeter
from tierload.layout import ManifestTable
from tierload.types import HeatTable

PAGE = 16384
BUDGET = 8 * PAGE
SETTINGS = Settings(page_bytes=PAGE, pack_below_bytes=1024, hot_budget_bytes=BUDGET, compression="fast", threads=2)


class Backwards(nn.Module):
    """Uses its parameters in another order than that of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Embedding(1024, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(torch.relu(self.b(self.c(words).mean(1))))
        return out


def metered() -> tuple[dict[str, Any], HeatMeter]:
    torch.manual_seed(3)
    model = Backwards()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    meter = HeatMeter(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 256, (8, 5))).square().mean().backward()  # of sixteen pages of words, four are used
        optimizer.step()
    return {"model": model, "optimizer": optimizer}, meter


def placed(path: Path, rank: int = 0) -> ManifestTable:
    with tierload.open(path) as store:
        head = store.head()
        assert head is not None
        return table_of(store._native.manifest(head.txid, rank))


def by_place(table: ManifestTable) -> list[int]:
    """Numbers of pages in the order in which they lie in segments."""
    order: list[int] = np.lexsort((table.pages["offset"], table.pages["segment"])).tolist()
    return order


def uses_of(table: ManifestTable, heat: HeatTable) -> list[float]:
    """How many tensors a step uses before each page of a manifest."""
    known = dict(zip(heat.keys, heat.first_use.tolist(), strict=True))
    infos = table.chunks.infos()
    return [
        min(known.get(infos[chunk].key, math.inf) for chunk in table.page_owner(page))
        for page in range(len(table.pages))
    ]


def heat_of(path: Path) -> HeatTable:
    with tierload.open(path) as store:
        found = store.heat()
    assert found is not None
    return found


def hot_pages(table: ManifestTable) -> list[int]:
    """The pages that lie first, as many as are hot: no other is hotter, and the budget has no room for one more."""
    sizes, heats, order = table.pages["raw_length"], table.pages["heat"].tolist(), by_place(table)
    counts = np.flatnonzero(np.cumsum(sizes[order]) <= BUDGET) + 1
    count = max(
        n for n in counts.tolist() if min(heats[page] for page in order[:n]) >= max(heats[page] for page in order[n:])
    )
    hottest_other = max(order[count:], key=lambda page: heats[page])
    assert int(sizes[order[:count]].sum()) + int(sizes[hottest_other]) > BUDGET
    return order[:count]


@pytest.mark.parametrize("way", ["save", "async_save", "in waves"])
def test_hot_pages_lie_first_and_together_as_a_step_uses_them(
    store: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    state, meter = metered()
    if way == "in waves":
        monkeypatch.setattr(Arenas, "take", lambda *given: _native.Arena(6 * PAGE))
    if way == "save":
        tierload.save(state, store, settings=SETTINGS, heat=meter)
    else:
        tierload.async_save(state, store, settings=SETTINGS, heat=meter).result()
    table = placed(store)
    uses, order, hot = uses_of(table, heat_of(store)), by_place(table), hot_pages(table)
    used = [page for page in order[len(hot) :] if uses[page] < math.inf]
    assert len({uses[page] for page in hot}) > 1
    for group in (hot, used):
        assert group == sorted(group, key=lambda page: (uses[page], page))
    assert order[: len(hot) + len(used)] == hot + used
    for one, two in pairwise(table.pages[hot + used]):
        assert two["offset"] == one["offset"] + -(-int(one["stored_length"]) // 4096) * 4096
    loaded: Any = tierload.load(store)
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(loaded["model"][name], tensor)


def test_pages_that_are_there_keep_their_places_and_new_ones_go_by_heat(store: Path) -> None:
    state, meter = metered()
    tierload.save(state, store, settings=SETTINGS, heat=meter)
    places = ["segment", "offset", "stored_length", "codec"]
    before = placed(store).pages[places]
    meter.weights = (0, 0, 1)
    assert tierload.save(state, store, heat=meter).written_bytes == 0
    assert (placed(store).pages[places] == before).all()
    with torch.no_grad():
        state["model"].a.weight.add_(1)
        state["model"].b.weight.add_(1)  # is used first
    report = tierload.save(state, store, heat=meter)
    table = placed(store)
    keys = [table.chunks.keys_at(table.page_owner(page))[0] for page in by_place(table)]
    new = keys[-report.written_pages :]
    assert list(dict.fromkeys(new)) == ["model/b.weight", "model/a.weight"]


def test_without_a_meter_pages_lie_as_they_are_planned(store: Path) -> None:
    state, _ = metered()
    tierload.save(state, store, settings=SETTINGS)
    table = placed(store)
    unlike = dict.fromkeys(table.pages["offset"][by_place(table)].tolist())  # equal pages have one place
    assert list(unlike) == list(dict.fromkeys(table.pages["offset"].tolist()))


@pytest.mark.parametrize(
    ("compression", "device", "raw"),
    [
        ("auto", devices.Device(write=1.0, read=math.inf), True),
        ("auto", devices.Device(write=1.0, read=1.0), False),
        ("auto", None, False),
        ("fast", devices.Device(write=1.0, read=math.inf), False),
    ],
)
def test_hot_pages_are_raw_where_they_load_faster_so(
    store: Path, monkeypatch: pytest.MonkeyPatch, compression: Any, device: devices.Device | None, raw: bool
) -> None:
    monkeypatch.setattr(devices, "remembered", lambda path: device)
    monkeypatch.setattr(devices, "UNKNOWN", devices.Device(write=1.0, read=devices.UNKNOWN.read))
    state, meter = metered()
    settings = replace(SETTINGS, compression=compression)
    tierload.save({"model": state["model"]}, store, settings=settings, heat=meter)
    table = placed(store)
    hot, codecs, large = hot_pages(table), table.pages["codec"], table.pages["raw_length"] == PAGE
    hot_rows = np.isin(np.arange(len(large)), hot)
    assert set(codecs[hot_rows & large].tolist()) == {0 if raw else 1}
    assert codecs[~hot_rows & large].all(), "others are compressed"


def together(rank: int, ranks: int, path: str) -> int:
    state, meter = metered()
    return tierload.save(state, path, settings=SETTINGS, heat=meter).written_pages


def test_each_rank_places_its_own_part(tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert min(results(2, together, str(path))) > 0
    for rank in range(2):
        table = placed(path, rank)
        uses, hot = uses_of(table, heat_of(path)), hot_pages(table)
        assert hot == sorted(hot, key=lambda page: (uses[page], page))
    state, _ = metered()
    loaded: Any = tierload.load(path)
    assert all(torch.equal(loaded["model"][name], value) for name, value in state["model"].state_dict().items())


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="hot_budget_bytes is -1; use 0 for a quarter"):
        Settings(hot_budget_bytes=-1)
