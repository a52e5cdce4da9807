"""A commit that is read in parts: its outline, boxes of its tensors, and values."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierload
from tests.convert.convert_support import filled
from tests.ranks.jobs import Shard, spread, whole
from tests.ranks.world import results
from tests.state.alike import assert_alike
from tierload.engine import CommitReader, Store
from tierload.state import Unread
from tierload.state.dtypes import BY_NAME
from tierload.types import Box

SETTINGS = tierload.Settings(page_bytes=4096, pack_below_bytes=512, compression="off", threads=2)


def saved(folder: Path, state: object) -> Store:
    store = Store(folder / "store", mode="w", settings=SETTINGS)
    store.save(state)
    return store


def box_of(tensor: torch.Tensor, chooser: random.Random) -> tuple[Box, tuple[slice, ...]]:
    """A box at random; it may be empty, or all of the tensor."""
    begins = [chooser.randint(0, size) for size in tensor.shape]
    sizes = [chooser.randint(0, size - begin) for begin, size in zip(begins, tensor.shape, strict=True)]
    slices = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
    return Box(tuple(begins), tuple(sizes)), slices


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(40, 60)
    return {
        "plain": torch.randn(50, 30, 3),
        "large": torch.randn(3000, 11),
        "turned": torch.randn(7, 9).t(),
        "rows": base[3:20:2],
        "base": base,
        "tied": base,
        "expanded": torch.randn(5, 1).expand(5, 8),
        "conj": torch.randn(6, 5, dtype=torch.complex64).conj(),
        "neg": torch.randn(6, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(4, 4)),
    }


def test_boxes_of_tensors_of_all_layouts(tmp_path: Path) -> None:
    tensors, chooser = odd_tensors(), random.Random(0)
    with saved(tmp_path, {"in": [tensors]}) as store:
        reader = store.reader()
        (outline,) = reader.state["in"]
        assert all(tensor.is_meta for tensor in outline.values())
        wanted, right = [], []
        for name, tensor in tensors.items():
            assert (outline[name].shape, outline[name].dtype) == (tensor.shape, tensor.dtype)
            for _ in range(6):
                box, slices = box_of(tensor, chooser)
                # Into memory of its own, into a part of something, and into other strides.
                room = torch.zeros([size + 2 for size in box.sizes], dtype=tensor.dtype)
                inside = room[tuple(slice(1, size + 1) for size in box.sizes)]
                turned = torch.zeros(box.sizes[::-1], dtype=tensor.dtype).permute(list(range(tensor.dim()))[::-1])
                for target in (torch.zeros(box.sizes, dtype=tensor.dtype), inside, turned):
                    wanted.append((outline[name], box, target))
                    right.append((name, tensor.detach()[slices], target))
        reader.read(wanted)
        for name, expected, target in right:
            assert torch.equal(target, expected), name


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_boxes_of_every_dtype(tmp_path: Path, name: str) -> None:
    tensor = filled(name, (9, 6))
    with saved(tmp_path, {"t": tensor}) as store:
        reader = store.reader()
        target = torch.empty((4, 3), dtype=tensor.dtype)
        reader.read([(reader.state["t"], Box((3, 2), (4, 3)), target)])
    size = tensor.element_size()
    rows = np.frombuffer(bytes(tensor.untyped_storage()), np.uint8).reshape(9, 6, size)  # type: ignore[call-overload]
    assert bytes(target.untyped_storage()) == rows[3:7, 2:5].tobytes()  # type: ignore[call-overload]


def test_boxes_that_do_not_fit_are_refused_all_at_once_and_nothing_is_read(tmp_path: Path) -> None:
    with saved(tmp_path, {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4, dtype=torch.int32)}) as store:
        reader = store.reader()
        state, all_of = reader.state, Box((0,), (4,))
        good, half, wide = torch.zeros(4), torch.zeros(4).half(), torch.zeros(4, dtype=torch.int64)
        wanted = [(state["a"], all_of, good), (state["b"], all_of, half), (state["c"], Box((0,), (3,)), wide)]
        with pytest.raises(tierload.KeyMismatch, match=r"'c': a part of shape \(4,\).*'b' is torch.float16") as told:
            reader.read(wanted)
        assert (told.value.shapes, set(told.value.dtypes)) == (("c",), {"b", "c"})
        assert not good.any()
        with pytest.raises(tierload.KeyMismatch, match="cast=True"):
            reader.read(wanted[:2])
        reader.read(wanted[:2], cast=True)
        assert good.all()
        assert half.all()
        for box in (Box((1,), (4,)), Box((-1,), (4,)), Box((0, 0), (4, 1)), Box((), ())):
            with pytest.raises(tierload.KeyMismatch, match="'a' of shape"):
                reader.read([(state["a"], box, torch.zeros(box.sizes))])
        with pytest.raises(tierload.KeyMismatch, match=r"'c' is torch.int64"):
            reader.read([(state["c"], all_of, wide)], cast=True)


def values_of(reader: CommitReader, state: Any) -> Any:
    """A state from its outline: everything read one by one."""
    if isinstance(state, Unread):
        return reader.values([state])[0]
    if isinstance(state, torch.Tensor):
        target = torch.empty_like(state, device="cpu")
        reader.read([(state, Box((0,) * state.dim(), tuple(state.shape)), target)])
        return target
    if isinstance(state, dict):
        for key, value in list(state.items()):
            state[key] = values_of(reader, value)
        return state
    return [values_of(reader, value) for value in state] if isinstance(state, list) else state


def test_values_of_all_kinds(tmp_path: Path) -> None:
    shared = [1, 2]
    Pair = collections.namedtuple("Pair", "a b")
    state = {
        "tuple": (1, torch.ones(3), [torch.zeros(2)]),
        "named": Pair(1, torch.ones(2)),
        "bytes": b"x" * 5000,
        "short": b"y",
        "array": np.arange(2000.0),
        "sparse": torch.eye(4).to_sparse(),
        "generator": torch.Generator().manual_seed(3),
        "python": random.Random(4),
        "rng": tierload.RNG(),
        "set": {1, 2},
        1: {(1, 2): torch.ones(2), None: 2.5},
        "ordered": collections.OrderedDict(b=torch.ones(1), a=float("inf")),
        "default": collections.defaultdict(list, a=[1]),
        "shared": [shared, shared],
        "module": torch.nn.BatchNorm1d(3),
        "huge": 1 << 100,
        "dtype": torch.bfloat16,
    }
    with saved(tmp_path, state) as store:
        right: Any = store.load()
        reader = store.reader()
        found = values_of(reader, reader.state)
    assert torch.equal(found.pop("generator").get_state(), right.pop("generator").get_state())
    assert found.pop("python").getstate() == right.pop("python").getstate()
    assert_alike(found, right)


def test_an_outline_reads_no_pages(tmp_path: Path) -> None:
    with saved(tmp_path, {"a": torch.ones(5000), "b": b"x" * 9000, "c": 3}):
        pass
    for segment in (tmp_path / "store" / "seg").iterdir():
        segment.unlink()
    with tierload.open(tmp_path / "store") as store:
        reader = store.reader()
        assert reader.state["a"].shape == (5000,)
        assert reader.state["c"] == 3
        with pytest.raises(OSError, match="seg"):
            reader.values([reader.state["b"]])


def test_optimizers_have_their_states_by_the_names_of_parameters(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    loose = torch.nn.Parameter(torch.ones(2))
    alone = torch.optim.SGD([loose], lr=0.1)
    with saved(tmp_path, {"model": model, "optimizer": optimizer, "alone": alone}) as store:
        found = store.reader().state
    names = [name for name, _ in model.named_parameters()]
    assert list(found["optimizer"]["state"]) == names
    assert found["optimizer"]["param_groups"][0]["params"] == names
    assert found["alone"]["param_groups"][0]["params"] == [0]


def test_pickles_are_read_when_they_are_allowed_to_be(tmp_path: Path) -> None:
    with Store(tmp_path / "store", mode="w") as store:
        store.save({"a": 1, "odd": slice}, allow_pickle=True)
        reader = store.reader()
        assert reader.state["a"] == 1
        with pytest.raises(tierload.UnsupportedValue, match=r"'odd'.*allow_pickle"):
            reader.values([reader.state["odd"]])
        reader = store.reader(allow_pickle=True)
        assert reader.values([reader.state["odd"]]) == [slice]


# Ranks


def by_ranks(rank: int, ranks: int, path: str) -> list[bool]:
    one = whole((400, 33))
    state = {"w": spread(one, (ranks,), [Shard(1)]), "own": torch.full((3,), rank), "b": b"%d" % rank * 5000}
    tierload.save(state, path, settings=SETTINGS)
    with Store(path) as store:
        reader = store.reader()
        target, own = torch.zeros(200, 20), torch.zeros(3, dtype=torch.int64)
        reader.read(
            [(reader.state["w"], Box((100, 7), (200, 20)), target), (reader.state["own"], Box((0,), (3,)), own)]
        )
        other = store.reader(rank=0)
        found = other.values([other.state["b"]])
    return [
        torch.equal(target, one[100:300, 7:27]),
        torch.equal(own, state["own"]),
        reader.commit.ranks == ranks,
        found == [b"0" * 5000],
    ]


def test_boxes_of_what_ranks_have_saved(tmp_path: Path) -> None:
    assert results(3, by_ranks, str(tmp_path / "store")) == [[True] * 4] * 3
