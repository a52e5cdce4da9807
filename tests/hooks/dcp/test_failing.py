"""What does not fit or goes wrong is told on every rank, by name, and nothing is half done."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import tierload
from tests.hooks.dcp.states import Config, load, raised, save
from tests.ranks.jobs import whole
from tests.ranks.world import results
from tierload.hooks.dcp import Reader, Writer


def steps(path: Path | str) -> list[int | None]:
    with tierload.open(path) as store:
        return [commit.step for commit in store.commits()]


# Strictness


def strictly(rank: int, ranks: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    save({"model": {"a": whole((2, 4)), "b": whole((3,), 1)}, "n": 1}, storage_writer=Writer(path, step=1))

    def loading(target: dict[str, Any], **options: Any) -> Any:
        return raised(lambda: load(target, storage_reader=Reader(path), **options))

    zeros = {"a": torch.zeros(2, 4), "b": torch.zeros(3)}
    found["missing"] = loading({"model": zeros | {"c": torch.zeros(1)}})
    found["renamed"] = loading({"net": zeros})
    found["shape"] = loading({"model": {"a": torch.zeros(2, 4), "b": torch.zeros(1, 3)}})
    found["broadcastable"] = loading({"model": {"a": torch.zeros(1, 4)}})
    found["dtype"] = loading({"model": {"a": torch.zeros(2, 4), "b": torch.zeros(3).double()}})
    found["kind"] = loading({"n": torch.zeros(1)})
    found["untouched"] = not any(one.any() for one in zeros.values())
    partial = {"model": zeros | {"c": torch.ones(1)}}
    load(partial, storage_reader=Reader(path), planner=DefaultLoadPlanner(allow_partial_load=True))
    found["partial"] = torch.equal(partial["model"]["b"], whole((3,), 1)) and partial["model"]["c"].item() == 1
    save({"n": 2}, storage_writer=Writer(path, step=2))
    found["commits"] = raised(lambda: load({"n": 0}, storage_reader=Reader(path, step=1 + rank)))
    found["no step"] = raised(lambda: load({"n": 0}, storage_reader=Reader(path, step=9)))
    found["no store"] = raised(lambda: load({"n": 0}, storage_reader=Reader(path + "-none")))
    return found


def test_strictness(tmp_path: Path) -> None:
    for found in results(2, strictly, str(tmp_path / "store")):
        told = {name: text for name, text in found.items() if isinstance(text, dict)}
        for name, words in {
            "missing": "model.c",
            "renamed": "net.a",
            "shape": "for model.b",
            "broadcastable": "for model.a",
            "dtype": "KeyMismatch: nothing was read: 'model/b' is torch.float64",
            "no step": "step 9",
            "no store": "holds no tierload store",
        }.items():
            assert set(told[name]) == {0, 1}, name
            assert all(words in text for text in told[name].values()), (name, told[name])
        assert "RanksDisagree" in told["commits"][0]
        assert not told["kind"]  # DCP puts in the place of a tensor what is no tensor
        assert found["untouched"]
        assert found["partial"]


# What goes wrong


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == 1:
            raise ValueError("no data for you")
        return super().resolve_data(write_item)


def failing(rank: int, ranks: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    save({"w": whole((4,))}, storage_writer=Writer(path, step=1))
    found["resolve"] = raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(path, step=2), planner=Failing()))
    strange = {"w": whole((4,)), "x": Config(3) if rank else 3, "f": open if rank else 1}
    found["value"] = raised(lambda: save(strange, storage_writer=Writer(path, step=3)))
    found["keys"] = raised(lambda: save({f"w{rank}": whole((4,))}, storage_writer=Writer(path, step=4)))
    found["paths"] = raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(f"{path}-{rank}", step=5)))
    found["steps"] = raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(path, step=6 + rank)))
    save({"w": whole((4,), 9)}, storage_writer=Writer(path, step=10))
    return found


def test_what_goes_wrong_on_one_rank_is_told_by_all_at_once(tmp_path: Path) -> None:
    for found in results(3, failing, str(tmp_path / "store"), limit=100):
        for name, (rank, words) in {
            "resolve": (1, "no data for you"),
            "value": (1, "state['f']"),
            "keys": (0, "'w1'"),
            "paths": (0, "different directories"),
            "steps": (0, "rank 1 saves with step 7, and rank 0 with 6"),
        }.items():
            assert set(found[name]) == {0, 1, 2}, name
            assert words in found[name][rank], (name, found[name])
        assert "rank 1" in found["resolve"][2]
    assert steps(tmp_path / "store") == [10, 1]
    assert not any(path.name.startswith("store-") for path in tmp_path.iterdir())


def other_planner(rank: int, ranks: int, path: str) -> dict[int, str]:
    class Bare(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            del self.state_dict
            return new_plan

    return raised(lambda: save({"w": whole((4,))}, storage_writer=Writer(path), planner=Bare()))


def test_a_planner_without_its_state_is_refused_by_name(tmp_path: Path) -> None:
    (told,) = results(1, other_planner, str(tmp_path / "store"))
    assert "Bare has no state_dict" in told[0]
