"""Values that share memory: on all ranks, on some only, with each rank's own values, and as parts of spread tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import tierload
from tests.ranks.jobs import spread, whole
from tests.ranks.world import results
from tierload import Settings

RANKS = 2
SIZES = {"packed": (3, 4), "cut among ranks": (64, 128)}


def settings(*per_rank: str) -> Settings:
    return Settings(per_rank=per_rank, page_bytes=4096, pack_below_bytes=1024, threads=1, rank_timeout_seconds=20)


def tied_with_own(rank: int, w: torch.Tensor) -> dict[str, Any]:
    return {"a": w, "b": w, "other": torch.ones(3)}


def view_with_own(rank: int, w: torch.Tensor) -> dict[str, Any]:
    return {"a": w, "b": w[1:], "other": torch.ones(3)}


def tied_on_rank_0(rank: int, w: torch.Tensor) -> dict[str, Any]:
    return {"a": w, "b": w if rank == 0 else w.clone()}


def view_on_rank_1(rank: int, w: torch.Tensor) -> dict[str, Any]:
    return {"a": w, "b": w[1:2] if rank == 1 else w[1:2].clone()}


def view_of_own_values(rank: int, w: torch.Tensor) -> dict[str, Any]:
    w = w + rank
    return {"a": w, "b": w[1:2] if rank == 1 else w[1:2].clone()}


def of_other_strides(rank: int, w: torch.Tensor) -> dict[str, Any]:
    return {"a": w.t() if rank == 1 else w.t().contiguous(), "b": torch.ones(3)}


def of_other_counts(rank: int, w: torch.Tensor) -> dict[str, Any]:
    return {"a": torch.zeros(3, 3).fill_diagonal_(float(rank)).to_sparse(), "b": torch.ones(3)}


CASES: dict[str, tuple[Callable[[int, torch.Tensor], dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = {
    "a tie with an own value": (tied_with_own, ("b",), ("a", "b")),
    "a tie with an own value that comes first": (tied_with_own, ("a",), ("a", "b")),
    "a view with an own value": (view_with_own, ("b",), ("a", "b")),
    "tied on rank 0 only": (tied_on_rank_0, (), ("a", "b")),
    "a view on rank 1 only": (view_on_rank_1, (), ("a", "b")),
    "a view of own values on rank 1 only": (view_of_own_values, (), ("a", "b")),
    "other strides on rank 1": (of_other_strides, (), ("a",)),
    "other numbers of elements in a sparse one": (of_other_counts, (), ("a",)),
}
"""Each state, what is declared to be each rank's own, and which keys are so in the end."""


def kept(rank: int, ranks: int, folder: str) -> None:
    for name, (make, per_rank, own) in CASES.items():
        for size, shape in SIZES.items():
            path = f"{folder}/{name} {size}"
            state = make(rank, whole(shape))
            tierload.save(state, path, settings=settings(*per_rank))
            loaded: Any = tierload.load(path)
            dist.barrier()
            for key, value in state.items():
                assert torch.equal(loaded[key].to_dense(), value.to_dense()), (name, size, key)
                assert loaded[key].layout is value.layout
            if state["a"].layout is torch.strided:
                same = [
                    one["a"].untyped_storage().data_ptr() == one["b"].untyped_storage().data_ptr()
                    for one in (state, loaded)
                ]
                assert same[0] == same[1], (name, size)
            with tierload.open(path) as store:
                assert store.own_keys() == own, (name, size)
                if rank == 0:
                    assert store.verify(full=True).ok, (name, size)


def test_memory_that_an_own_value_shares_is_own_too_and_every_rank_gets_back_its_state(tmp_path: Path) -> None:
    results(RANKS, kept, str(tmp_path))


def of_one_rank_and_of_all(rank: int, ranks: int, path: str) -> str:
    w = spread(whole((4, 3)), (ranks,), [Shard(0)])
    with pytest.raises(tierload.RanksDisagree) as caught:
        tierload.save({"a": w, "b": w}, path, settings=settings("b"))
    return str(caught.value)


def test_a_spread_tensor_that_shares_memory_with_an_own_value_is_refused(tmp_path: Path) -> None:
    for said in results(RANKS, of_one_rank_and_of_all, str(tmp_path / "store")):
        assert "'a' is spread over ranks, and so is not the value of one of them" in said
        assert "'b'" not in said


def ties_elsewhere(rank: int, ranks: int, path: str) -> tuple[str, ...]:
    """Rank 0 has more ties than rank 1, in its own values and before the others."""
    mine = torch.full((3,), float(rank))
    model, part = whole((4, 3)), spread(whole((4, 3), 1), (ranks,), [Shard(0)])
    state = {
        "a loader": [mine, mine] if rank == 0 else [mine, mine.clone()],
        "model": {"embedding": model, "head": model},
        "spread": {"embedding": part, "head": part},
    }
    tierload.save(state, path, settings=settings("a loader"))
    loaded: Any = tierload.load(path)
    assert loaded["model"]["embedding"] is loaded["model"]["head"]
    assert loaded["spread"]["embedding"] is loaded["spread"]["head"]
    assert (loaded["a loader"][0] is loaded["a loader"][1]) == (rank == 0)
    with tierload.open(path) as store:
        return store.own_keys()


def test_ties_among_one_ranks_own_values_do_not_make_others_unequal(tmp_path: Path) -> None:
    assert results(RANKS, ties_elsewhere, str(tmp_path / "store")) == [("a loader",)] * RANKS


def parts_without_elements(rank: int, ranks: int, path: str) -> None:
    """Of tied tensors only rank 0 has elements; the others' bytes are not together in memory."""
    w = spread(whole((1, 4)), (ranks,), [Shard(0)])
    mesh = w.device_mesh
    columns = DTensor.from_local(whole((4, 3)).t(), mesh, [Shard(0)], run_check=False)
    copies = [spread(whole((300, 100), seed), (ranks,), [Replicate()]) for seed in range(2)]
    state = {"w": w.detach(), "v": w.detach(), "c": columns.detach(), "d": columns.detach(), "copies": copies}
    tierload.save(state, path, settings=settings())
    loaded: Any = tierload.load(path)
    assert torch.equal(loaded["w"], whole((1, 4)))
    assert loaded["w"] is loaded["v"]
    assert torch.equal(loaded["c"], torch.cat([whole((4, 3)).t()] * ranks))
    assert loaded["c"] is loaded["d"]
    assert all(torch.equal(one, whole((300, 100), seed)) for seed, one in enumerate(loaded["copies"]))


def test_tied_spread_tensors_are_tied_on_all_ranks_whatever_their_parts_are(tmp_path: Path) -> None:
    results(3, parts_without_elements, str(tmp_path / "store"))
    with tierload.open(tmp_path / "store") as store:
        assert store.verify(full=True).ok
