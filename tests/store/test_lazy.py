"""A lazy load: what a load gives, read when it is used and no more of it than is needed."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.convert.convert_support import filled
from tests.ranks.jobs import Shard, spread, whole
from tests.ranks.world import results
from tests.state.alike import assert_alike, materialised
from tests.store.support import Child, damage_byte, in_child
from tests.store.test_bytes_read import MOST, forget, needed, read_so_far, saved
from tests.store.test_reading_parts import SETTINGS, odd_tensors
from tierload.engine import Store
from tierload.engine.loading import table_of
from tierload.state import LazyTensor
from tierload.state.dtypes import BY_NAME

INDICES: list[Any] = [
    3,
    -1,
    np.int64(4),
    slice(2, 9),
    slice(-7, None),
    slice(9, 2),
    slice(1, None, 3),
    (slice(2, 5), slice(3, 8)),
    (4, slice(None), -2),
    (..., 1),
    (slice(None, None, 2), ..., slice(1, 2)),
    (None, 3, None),
    (),
    ...,
    [5, 1, 1, -2],
    torch.tensor([[0, 39], [7, 8]]),
    torch.tensor(6),
    np.array([2, 30]),
    torch.empty(0, dtype=torch.int64),
    (slice(3, 20), torch.tensor([1, 4])),
    (torch.tensor([3, 5]), torch.tensor([1, 4])),
    (torch.tensor([3, 5]), slice(None), [0, 2]),
    torch.arange(40) % 3 == 0,
    (slice(None), torch.arange(9) > 4),
    True,
]


def kept(folder: Path, state: object) -> Path:
    with Store(folder / "store", mode="w", settings=SETTINGS) as store:
        store.save(state)
    return folder / "store"


def lost_pages(path: Path) -> None:
    for segment in (path / "seg").iterdir():
        segment.unlink()


def test_all_of_it_is_what_a_load_gives(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    state = {
        "odd": [odd_tensors(), (torch.ones(3), 2)],
        "model": model,
        "optimizer": optimizer,
        "bytes": b"x" * 5000,
        "array": np.arange(2000.0),
        "sparse": torch.eye(4).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(torch.ones(9), 0.5, 1, torch.qint8),
        "rng": tierload.RNG(),
        1: {(1, 2): torch.ones(2), None: 2.5},
    }
    path = kept(tmp_path, state)
    right, lazy = tierload.load(path), tierload.load(path, lazy=True)
    assert isinstance(lazy, dict)
    assert isinstance(lazy["model"]["0.weight"], LazyTensor)
    assert isinstance(lazy["optimizer"]["state"][0]["exp_avg"], LazyTensor)
    assert_alike(materialised(lazy), right)


def test_models_and_optimizers_take_it_as_it_is(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(5, 2)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    state: Any = tierload.load(kept(tmp_path, {"model": model, "optimizer": optimizer}), lazy=True)
    other, its_optimizer = made()
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    for _ in range(2):
        step(model, optimizer)
        step(other, its_optimizer)
    assert_alike(materialised(other.state_dict()), model.state_dict())
    assert_alike(materialised(its_optimizer.state_dict()), optimizer.state_dict())


@pytest.mark.parametrize("view", ["plain", "turned", "swapped", "rows", "conj"])
def test_an_index_gives_what_it_gives_of_the_tensor(tmp_path: Path, view: str) -> None:
    base = torch.randn(40, 9, 3)
    tensor = {
        "plain": base,
        "turned": torch.randn(3, 9, 40).permute(2, 1, 0),
        "swapped": torch.randn(40, 3, 9).transpose(1, 2),
        "rows": torch.randn(80, 9, 3)[::2],
        "conj": torch.randn(40, 9, 3, dtype=torch.complex64).conj(),
    }[view]
    lazy: Any = tierload.load(kept(tmp_path, {"t": tensor}), lazy=True)
    for index in INDICES[:-1]:
        found = lazy["t"][index]
        assert type(found) is torch.Tensor
        assert torch.equal(found, tensor[index]), index
        assert "not read" in repr(lazy["t"])
    assert torch.equal(lazy["t"][INDICES[-1]], tensor[INDICES[-1]])
    for index in INDICES:  # and of one that was read
        assert torch.equal(lazy["t"][index], tensor[index])


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_slices_of_every_dtype(tmp_path: Path, name: str) -> None:
    lazy: Any = tierload.load(kept(tmp_path, {"t": filled(name, (9, 6))}), lazy=True)
    right: Any = tierload.load(tmp_path / "store")
    found, wanted = lazy["t"][3:7, 2:5], right["t"][3:7, 2:5]
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    size = found.element_size()
    rows = np.frombuffer(bytes(right["t"].untyped_storage()), np.uint8).reshape(9, 6, size)
    assert bytes(found.untyped_storage()) == rows[3:7, 2:5].tobytes()


def test_indices_that_leave_the_tensor_are_refused(tmp_path: Path) -> None:
    lazy: Any = tierload.load(kept(tmp_path, {"t": torch.ones(4, 3)}), lazy=True)
    for index in (4, -5, (0, 3), (0, 0, 0), torch.tensor([0, 4]), (slice(None), [-4])):
        with pytest.raises(IndexError):
            lazy["t"][index]


def test_what_is_known_of_a_tensor_needs_no_pages(tmp_path: Path) -> None:
    model = torch.nn.Linear(7, 5)
    path = kept(tmp_path, {"model": model, "n": torch.arange(6)})
    lazy: Any = tierload.load(path, lazy=True)
    lost_pages(path)
    weight, numbers = lazy["model"]["weight"], lazy["n"]
    assert (weight.shape, weight.size(0), weight.ndim, weight.numel(), len(weight)) == ((5, 7), 5, 2, 35, 5)
    assert (weight.dtype, weight.device, weight.stride()) == (torch.float32, torch.device("cpu"), (7, 1))
    assert numbers.dtype is torch.int64
    assert not torch.is_floating_point(numbers)
    assert repr(weight) == "LazyTensor('model/weight', shape=(5, 7), dtype=torch.float32, not read)"
    assert weight in {weight}
    for use in (lambda: weight + 1, lambda: weight[0], lambda: numbers.sum(), lambda: torch.cat([numbers, numbers])):
        with pytest.raises(OSError, match="seg"):
            use()


def test_any_use_goes_on_with_the_same_tensor(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    path = kept(tmp_path, {"a": base, "tied": base, "rows": base[1:3], "other": torch.ones(3)})
    lazy: Any = tierload.load(path, lazy=True)
    assert lazy["a"] is lazy["tied"]
    lazy["rows"].zero_()
    assert torch.equal(lazy["a"][1:3], torch.zeros(2, 4))
    assert lazy["a"].materialise() is lazy["a"].materialise()
    lazy["a"][0, 0] = 5
    assert lazy["a"].numpy()[0, 0] == 5
    assert torch.equal(1 - lazy["other"], torch.zeros(3))
    assert torch.equal(torch.stack([lazy["other"]] * 2), torch.ones(2, 3))
    lazy["other"] += 1
    assert torch.equal(lazy["other"], torch.full((3,), 2.0))
    assert torch.equal(tierload.load(path)["rows"], base[1:3])  # type: ignore[index]


def test_copies_pickles_and_saves_hold_the_values(tmp_path: Path) -> None:
    tensors = odd_tensors()
    path = kept(tmp_path, tensors)
    right = tierload.load(path)
    copies = [copy.deepcopy(tierload.load(path, lazy=True)), pickle.loads(pickle.dumps(tierload.load(path, lazy=True)))]
    torch.save(tierload.load(path, lazy=True), tmp_path / "file")
    copies.append(torch.load(tmp_path / "file", weights_only=False))
    for found in copies:
        assert not any(isinstance(tensor, LazyTensor) for tensor in found.values())
        assert all(torch.equal(tensor, right[name]) for name, tensor in found.items())  # type: ignore[index]
    for target in (path, tmp_path / "new"):  # also into the store that it reads from
        with Store(target, mode="w", settings=SETTINGS) as store:
            store.async_save(tierload.load(path, lazy=True)).durable()
            assert_alike(store.load(), right)


def test_keys_and_targets(tmp_path: Path) -> None:
    path = kept(tmp_path, {"a": {"b": torch.ones(2), "c": torch.ones(3)}, "d": torch.ones(1)})
    found: Any = tierload.load(path, lazy=True, keys="a/b")
    assert_alike(materialised(found), {"a": {"b": torch.ones(2)}})
    with pytest.raises(tierload.KeyMismatch, match="'x'"):
        tierload.load(path, lazy=True, keys="x")
    for options in ({"into": {"d": torch.ones(1)}}, {"together": True}):
        with pytest.raises(tierload.InvalidRequest, match="leave out into="):
            tierload.load(path, lazy=True, **options)  # type: ignore[arg-type]


# Damage, and what becomes of the store


def test_a_damaged_page_is_told_by_the_use_that_needs_it(tmp_path: Path) -> None:
    path = kept(tmp_path, {"a": torch.randn(4096), "b": torch.randn(4096)})
    with tierload.open(path) as store:
        manifest = store._native.manifest(store.head().txid)  # type: ignore[union-attr]
        table = table_of(manifest)
        page = int(table.rows[store.info("b").number]["first_page"]) + 2
        row = table.pages[page]
        file = manifest.segment_path(int(row["segment"]))
        damage_byte(path / file, int(row["offset"]) + 5)
    lazy: Any = tierload.load(path, lazy=True)
    lazy["a"].sum()
    right = lazy["b"][:2048].clone(), lazy["b"][3072:].clone()
    for use in (lambda: lazy["b"][2000:2100], lambda: lazy["b"][[0, 2048]], lambda: lazy["b"].sum()):
        with pytest.raises(tierload.CorruptPage, match="key 'b'") as told:
            use()
        assert (told.value.key, told.value.page, told.value.path) == ("b", page, file)
        assert "not read" in repr(lazy["b"])
    assert torch.equal(lazy["b"][:2048], right[0])
    assert torch.equal(lazy["b"][3072:], right[1])


def test_what_is_open_outlives_rollbacks_collections_and_its_store(tmp_path: Path) -> None:
    states = [{"a": torch.randn(5000), "b": torch.randn(5000)} for _ in range(4)]
    path = tmp_path / "store"
    with Store(path, mode="w", settings=SETTINGS) as store:
        store.save(states[0], step=0)
        lazies: list[Any] = [tierload.load(path, lazy=True), store.load(lazy=True)]
        for step in (1, 2):
            store.save(states[step], step=step)
        store.rollback(1)
        assert store.collect(keep=1).pinned
        store.save(states[3], step=3)
        assert store.collect(keep=1).pinned
    for lazy in lazies:
        assert torch.equal(lazy["b"][4000:], states[0]["b"][4000:])
        assert torch.equal(lazy["a"], states[0]["a"])
    with Store(path, mode="w", settings=SETTINGS) as store:
        assert store.collect(keep=1).pinned  # "b" is not read
        for lazy in lazies:
            lazy["b"].materialise()
        done = store.collect(keep=1)  # and all of them are held no more
        assert not done.pinned
        assert done.removed_files


def test_threads_share_what_they_read(tmp_path: Path) -> None:
    tensors = {str(n): torch.randn(3000) for n in range(12)}
    lazy: Any = tierload.load(kept(tmp_path, tensors), lazy=True)
    barrier = threading.Barrier(4)

    def use(_: int) -> list[torch.Tensor]:
        barrier.wait()
        assert all(torch.equal(lazy[name][100:200], tensor[100:200]) for name, tensor in tensors.items())
        return [tensor.materialise() for tensor in lazy.values()]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(use, range(4)))
    assert all(one is other for every in zip(*found, strict=True) for one in every for other in every)
    assert all(torch.equal(one, tensor) for one, tensor in zip(found[0], tensors.values(), strict=True))


def test_a_forked_process_reads_on(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5000), "b": torch.randn(5000)}
    path = kept(tmp_path, tensors)
    lazy: Any = tierload.load(path, lazy=True)
    lazy["a"].materialise()

    def body() -> bool:
        with Store(path, mode="w", settings=SETTINGS) as store:  # collects what nobody holds
            store.save({"c": 1})
            store.collect(keep=1)
        return all(torch.equal(lazy[name][1000:], tensors[name][1000:]) for name in tensors)

    assert in_child(body).value is True
    assert torch.equal(lazy["b"], tensors["b"])


def test_a_forked_process_has_a_pin_of_its_own(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5000), "b": torch.randn(5000)}
    path = kept(tmp_path, tensors)
    held: list[Any] = [tierload.load(path, lazy=True)]

    def body(pipe: Connection) -> None:
        for name in tensors:
            pipe.send(torch.equal(held[0][name][1000:], tensors[name][1000:]))
            pipe.recv()

    with Child(body) as child:
        assert child.hear() is True
        held.clear()
        with Store(path, mode="w", settings=SETTINGS) as store:
            store.save({"c": 1})
            assert store.collect(keep=1).pinned
            assert child.ask("collected") is True
            child.end()
            assert not store.collect(keep=1).pinned


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, path: Path) -> None:
        self.state: Any = tierload.load(path, lazy=True)
        self.state["read"].materialise()

    def __len__(self) -> int:
        return len(self.state["x"])

    def __getitem__(self, index: int) -> torch.Tensor:
        assert "not read" in repr(self.state["x"])
        row: torch.Tensor = self.state["x"][index] + self.state["read"]
        return row


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_read_rows(tmp_path: Path, start: str) -> None:
    rows = torch.randn(24, 50)
    data = Rows(kept(tmp_path, {"x": rows, "read": torch.ones(50)}))
    workers = 2 if start == "fork" else 1
    loader = torch.utils.data.DataLoader(data, batch_size=6, num_workers=workers, multiprocessing_context=start)
    assert torch.equal(torch.cat(list(loader)), rows + 1)
    assert "not read" in repr(data.state["x"])


# How much is read


@pytest.mark.parametrize("compression", ["off", "fast"])
def test_a_slice_reads_its_pages_alone(disk: Path, compression: str) -> None:
    path = disk / "store"
    state = saved(path, compression, 3, 24 << 20)
    before = read_so_far()
    lazy: Any = tierload.load(path, lazy=True)
    assert read_so_far() - before < 1 << 20
    with tierload.open(path) as store:
        page = needed(store, {"1"}) / 24
    for index, pages in ((slice(1 << 18, 3 << 18), 2), (5 << 18, 1), ([7 << 18, 9 << 18, (9 << 18) + 1], 2)):
        before = read_so_far()
        found = lazy["1"][index]
        read = read_so_far() - before
        assert torch.equal(found, state["1"][index])
        assert 0 < read <= pages * page * 1.1
    before = read_so_far()
    lazy["2"].materialise()
    assert read_so_far() - before <= MOST * 24 * page


def test_a_slice_of_a_turned_tensor_reads_its_pages_alone(disk: Path) -> None:
    path, turned = disk / "store", torch.randn(4096, 1024).t()
    with Store(path, mode="w", settings=tierload.Settings(compression="off")) as store:
        store.save({"t": turned})
    forget(path)
    lazy: Any = tierload.load(path, lazy=True)
    before = read_so_far()
    found = lazy["t"][:, 300:400]
    assert 0 < read_so_far() - before <= 3 << 20
    assert torch.equal(found, turned[:, 300:400])


# Ranks


def by_ranks(rank: int, ranks: int, path: str) -> list[bool]:
    one = whole((400, 33))
    tierload.save({"w": spread(one, (ranks,), [Shard(1)]), "own": torch.full((3,), rank)}, path, settings=SETTINGS)
    lazy: Any = tierload.load(path, lazy=True)
    other: Any = tierload.load(path, lazy=True, rank=0)
    return [
        torch.equal(lazy["w"][100:300, 7:27], one[100:300, 7:27]),
        torch.equal(lazy["w"], one),
        torch.equal(lazy["own"], torch.full((3,), rank)),
        torch.equal(other["own"], torch.full((3,), 0)),
    ]


def test_what_ranks_have_saved(tmp_path: Path) -> None:
    assert results(3, by_ranks, str(tmp_path / "store")) == [[True] * 4] * 3
    assert os.listdir(tmp_path / "store" / "seg")
