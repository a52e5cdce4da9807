"""Situations that people have reported of other checkpoint libraries, as tests; the numbers are those of our list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tierload
from tests.ranks.jobs import spread, whole
from tests.ranks.world import results
from tierload import Settings
from tierload.plan import holders, local_boxes, local_shape
from tierload.types import Box, Layout, Mesh

SETTINGS = Settings(compression="fast", page_bytes=4096, pack_below_bytes=1024, threads=1, rank_timeout_seconds=30)

# B68: dimensions that the ranks do not divide evenly, and ranks that are left without a row.

UNEVEN: dict[str, tuple[tuple[int, ...], int]] = {
    "6 rows": ((6, 5), 0),
    "4096 rows": ((4096, 3), 0),
    "1 batch": ((1, 37, 8), 0),
    "1 row": ((1,), 0),
    "1 column": ((40, 1), 1),
    "no row": ((0, 4), 0),
}
"""Shapes, and the dimension that is cut."""

COUNTS = [1, 2, 3, 5, 8]


def uneven_state(ranks: int, seed: int) -> dict[str, Any]:
    """With one rank, too, they are spread: over a mesh of one."""
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        name: distribute_tensor(whole(shape, seed), mesh, [Shard(dim)], src_data_rank=None)
        for name, (shape, dim) in UNEVEN.items()
    }


def save_uneven(rank: int, ranks: int, folder: str) -> dict[str, tuple[int, ...]]:
    state = uneven_state(ranks, 3)
    tierload.save(state, f"{folder}/{ranks}", settings=SETTINGS)
    return {name: tuple(value.to_local().shape) for name, value in state.items()}


def load_uneven(rank: int, ranks: int, folder: str) -> None:
    right = uneven_state(ranks, 3)
    for saved in COUNTS:
        state = uneven_state(ranks, 99)
        tierload.load(f"{folder}/{saved}", into=state)
        for name, value in state.items():
            assert torch.equal(value.to_local(), right[name].to_local()), (saved, name)
        loaded: Any = tierload.load(f"{folder}/{saved}")
        assert all(torch.equal(loaded[name], whole(shape, 3)) for name, (shape, _) in UNEVEN.items())


@pytest.mark.slow
def test_b68_uneven_and_empty_parts_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    rows = {ranks: [held["6 rows"][0] for held in results(ranks, save_uneven, str(tmp_path))] for ranks in COUNTS}
    assert rows[5] == [2, 2, 2, 0, 0]
    for ranks in COUNTS:
        with tierload.open(tmp_path / str(ranks)) as store:
            assert store.verify(full=True).ok
        results(ranks, load_uneven, str(tmp_path))


@pytest.mark.parametrize(("rows", "ranks"), [(6, 4), (4096, 30), (1, 8), (29, 30)])
def test_b68_parts_of_many_ranks_are_disjoint_and_all(rows: int, ranks: int) -> None:
    shape, layout = (rows, 7), Layout(Mesh((ranks,), tuple(range(ranks))), (0,))
    held = [[box for box, _ in local_boxes(shape, layout, rank)] for rank in range(ranks)]
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]  # torch's own word on who has how many
    assert [local_shape(shape, layout, rank)[0] for rank in range(ranks)] == chunks + [0] * (ranks - len(chunks))
    covered = [row for boxes in held for box in boxes for row in range(box.offsets[0], box.offsets[0] + box.sizes[0])]
    assert covered == list(range(rows))
    assert [rank for rank, _ in holders(shape, layout, 0, Box((0, 0), shape))] == [
        rank for rank in range(ranks) if held[rank]
    ]


# B69: what each rank has of its own comes back to it, and is no other rank's.


def own_state(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    torch.rand(rank + 1, generator=generator)
    loader = {"rank": rank, "position": [rank] * (rank + 1), f"worker {rank}": {"queue": torch.arange(rank + 2)}}
    return {"w": torch.full((3,), float(rank)), "rng": generator, "loader": loader, "epoch": 4}


def save_own(rank: int, ranks: int, path: str) -> None:
    settings = Settings(per_rank=("loader",), rank_timeout_seconds=30)
    tierload.async_save(own_state(rank), path, settings=settings).durable()


def assert_own(got: Any, rank: int) -> None:
    right = own_state(rank)
    assert torch.equal(got["w"], right["w"])
    assert torch.equal(got["rng"].get_state(), right["rng"].get_state())
    assert got["loader"].keys() == right["loader"].keys()
    assert got["loader"]["position"] == right["loader"]["position"]
    assert torch.equal(got["loader"][f"worker {rank}"]["queue"], right["loader"][f"worker {rank}"]["queue"])
    assert got["epoch"] == 4


def load_own(rank: int, ranks: int, path: str, saved: int) -> None:
    owner = rank % saved
    assert_own(tierload.load(path), owner)
    into = own_state(owner)
    into["w"].zero_()
    into["rng"].manual_seed(99)
    into["loader"][f"worker {owner}"]["queue"].zero_()
    into["loader"]["position"] = []
    tierload.load(path, into=into)
    assert_own(into, owner)
    for other in range(saved):
        assert_own(tierload.load(path, rank=other), other)


@pytest.mark.parametrize("ranks", [3, 1, 2, 5])
def test_b69_each_rank_gets_its_own_generator_loader_and_tensors(tmp_path: Path, ranks: int) -> None:
    path = str(tmp_path / "store")
    results(3, save_own, path)
    results(ranks, load_own, path, 3)


# B70: a tensor that was cut in one way is loaded in another, on another number of ranks.

MESHES = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 6: [(6,)], 8: [(8,)]}


def save_each_way(rank: int, ranks: int, folder: str) -> None:
    for name, placement in {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}.items():
        tierload.save({"w": spread(whole((13, 9)), (ranks,), [placement])}, f"{folder}/{name}", settings=SETTINGS)


def load_each_way(rank: int, ranks: int, folder: str) -> None:
    for name in ("rows", "columns", "copies"):
        for shape in MESHES[ranks]:
            for first in (Shard(0), Shard(1), Replicate()):
                for second in (Shard(0), Shard(1), Replicate())[: 3 if len(shape) == 2 else 1]:
                    placements = [first, second][: len(shape)]
                    w: DTensor = spread(whole((13, 9), 5), shape, placements)
                    tierload.load(f"{folder}/{name}", into={"w": w})
                    right: DTensor = spread(whole((13, 9)), shape, placements)
                    assert torch.equal(w.to_local(), right.to_local()), (name, shape, placements)


@pytest.fixture(scope="module")
def cut_in_each_way(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("ways"))
    results(4, save_each_way, folder)
    return folder


@pytest.mark.parametrize("ranks", MESHES)
def test_b70_rows_columns_and_copies_become_each_other(cut_in_each_way: str, ranks: int) -> None:
    results(ranks, load_each_way, cut_in_each_way)
