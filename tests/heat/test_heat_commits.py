"""Heat in commits: what a save takes from a meter, where it is kept, and that it changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import tierload
from tests.ranks.world import results
from tierload import CorruptStore, InvalidRequest, Settings
from tierload.engine.loading import table_of
from tierload.heat import HeatMeter
from tierload.rescue.__main__ import main as rescue
from tierload.state import read_heat, write_heat
from tierload.types import HeatTable

SETTINGS = Settings(page_bytes=4096, pack_below_bytes=1024, threads=1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.out = nn.Embedding(256, 16), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.relu(self.hidden(self.words(words).mean(1))))
        return out


def metered(steps: int = 4) -> tuple[Words, torch.optim.Optimizer, HeatMeter]:
    torch.manual_seed(3)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    meter = HeatMeter(model, optimizer)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer, meter


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randint(0, 64, (8, 5))).square().mean().backward()  # of four pages of words, the first is used
    optimizer.step()


def page_heats(path: Path, key: str | None = None) -> npt.NDArray[np.uint16]:
    """Of all rows of pages, or those of one tensor."""
    with tierload.open(path) as store:
        head = store.head()
        assert head is not None
        table = table_of(store._native.manifest(head.txid, 0))
        if key is None:
            return table.pages["heat"]
        row = table.rows[store.info(key).number]
        return table.pages["heat"][row["first_page"] :][: row["pages"]]


def level(heat: float) -> int:
    return round(float(np.float32(heat)) * 65534) + 1


def test_a_commit_has_the_heat_of_each_parameter_and_of_its_pages(store: Path) -> None:
    model, optimizer, meter = metered()
    scores, pages, uses = meter.scores(), meter.pages(4096), meter.next_uses()
    tierload.save({"net": model, "optimizer": optimizer}, store, settings=SETTINGS, heat=meter)
    with tierload.open(store) as reader:
        found = reader.heat()
    assert found is not None
    names = [key.removeprefix("net/") for key in found.keys]
    assert sorted(names) == sorted(scores)
    assert found.heat.tolist() == pytest.approx([scores[name].heat for name in names])
    assert found.first_use.tolist() == [uses[name] for name in names]
    assert found.gradient.min() > 0
    assert found.radius.min() > 0
    assert list(found.pages) == ["net/words.weight"]
    expected = [page.heat for page in pages["words.weight"]]
    assert found.pages["net/words.weight"].tolist() == pytest.approx(expected)
    assert expected[0] > max(expected[1:])
    assert page_heats(store, "net/words.weight").tolist() == [level(heat) for heat in expected]
    assert page_heats(store, "net/hidden.weight").tolist() == [level(scores["hidden.weight"].heat)]
    packed = [scores[name].heat for name in ("hidden.bias", "out.bias", "out.weight")]
    assert page_heats(store, "net/out.weight").tolist() == [level(max(packed))]
    assert page_heats(store, "optimizer/state/net~1words.weight/exp_avg").tolist() == [0] * 4


def test_another_heat_writes_no_page_and_changes_nothing_that_is_loaded(store: Path) -> None:
    model, _, meter = metered()
    state = model.state_dict()  # other tensors over the same memory
    tierload.save(state, store, settings=SETTINGS, heat=meter)
    before = page_heats(store)
    meter.weights = (0, 0, 1)
    again = tierload.async_save(state, store, heat=meter)
    meter.weights = (1, 0, 0)  # the heat is that of the call
    report = again.result()
    assert (report.written_pages, report.commit.written_bytes) == (0, 0)
    meter.weights = (0, 0, 1)
    with tierload.open(store) as reader:
        found = reader.heat()
        assert found is not None
        assert dict(zip(found.keys, found.heat.tolist(), strict=True)) == pytest.approx(
            {name: heat.heat for name, heat in meter.scores().items()}
        )
        assert reader.verify().ok
    assert (page_heats(store) != before).any()
    loaded: Any = tierload.load(store)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    tierload.save(state, store)
    with tierload.open(store) as reader:
        assert reader.heat() is None
        assert reader.heat(reader.commits()[1]) is not None
    assert not page_heats(store).any(), "an old heat is not that of a new commit"


def test_only_parameters_that_are_in_the_state_have_heat(store: Path) -> None:
    model, _, meter = metered()
    tierload.save({"out": model.out, "other": torch.ones(3)}, store, settings=SETTINGS, heat=meter)
    with tierload.open(store) as reader:
        found = reader.heat()
    assert found is not None
    assert sorted(found.keys) == ["out/bias", "out/weight"]


@pytest.mark.parametrize("save", [tierload.save, tierload.async_save])
def test_what_is_no_meter_is_refused_before_anything_is_written(store: Path, save: Any) -> None:
    tierload.save({"w": torch.ones(3)}, store)
    with pytest.raises(InvalidRequest, match="heat= is a Linear; give the"):
        save({"w": torch.zeros(3)}, store, heat=nn.Linear(2, 2))
    with tierload.open(store) as reader:
        assert len(reader.commits()) == 1


def test_readers_that_know_nothing_of_heat_read_such_a_commit(store: Path, tmp_path: Path) -> None:
    model, optimizer, meter = metered()
    tierload.save({"net": model, "optimizer": optimizer}, store, settings=SETTINGS, heat=meter)
    assert rescue([str(store), "--to", str(tmp_path / "rescued.safetensors")]) == 0
    lazy: Any = tierload.load(store, lazy=True)
    assert torch.equal(lazy["net"]["words.weight"][:3], model.words.weight[:3])


def test_damaged_heat_is_told_and_costs_nothing_else() -> None:
    column = np.array([0.5], np.float32)
    table = HeatTable(("w",), column, column, column, column, np.array([0], np.int32), {"w": np.ones(2, np.float32)})
    document = json.loads(write_heat(b'{"version":1,"root":null}', table, ["w"]))
    for name, wrong in [("chunks", [1]), ("heat", "AAAA"), ("radius", 3), ("pages", [[0]]), ("first_use", "")]:
        damaged = document | {"heat": document["heat"] | {name: wrong}}
        with pytest.raises(CorruptStore, match="the heat in the state document"):
            read_heat(json.dumps(damaged).encode(), ["w"])


def together(rank: int, ranks: int, path: str) -> list[Any]:
    model, _, meter = metered()
    state = {"net": model, "mine": torch.full((4,), float(rank))}
    saved = [tierload.save(state, path, settings=SETTINGS, heat=meter).written_pages]
    meter.weights = (0, 0, 1)
    saved.append(tierload.save(state, path, heat=meter).written_pages)
    return saved


def test_ranks_save_the_heat_of_what_they_write_together(tmp_path: Path) -> None:
    path = tmp_path / "store"
    (first, again), (others, others_again) = results(2, together, str(path))
    assert first > 0
    assert others > 0
    assert again == others_again == 0
    _, _, meter = metered()
    meter.weights = (0, 0, 1)
    expected = sorted(level(page.heat) for page in meter.pages(4096)["words.weight"])
    with tierload.open(path) as store:
        found, head = store.heat(), store.head()
        assert found is not None
        assert head is not None
        assert sorted(found.keys) == sorted(f"net/{name}" for name in meter.scores())
        heats: list[int] = []
        for rank in range(2):
            table = table_of(store._native.manifest(head.txid, rank))
            for info, row in zip(table.chunks.infos(), table.rows, strict=True):
                if info.key == "net/words.weight":
                    heats += table.pages["heat"][row["first_page"] :][: row["pages"]].tolist()
        assert sorted(heats) == expected
