"""Kinds of tensors and modules that arrive: dtypes, layouts, shared memory, parametrisations, commits of ranks, loaders
of data in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset

import tierload
from tests.golden.make import copied
from tests.golden.states_ranks import whole
from tests.hot.starts import SMALL, WORDS, assert_same, fresh, held, trained
from tests.state.alike import assert_alike
from tests.state.odd_tensors import noise

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
OTHERS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int16, torch.uint8, torch.bool)


class Odd(nn.Module):
    """All dtypes in 1 to 17 bytes, no elements, no dimensions, strides of all kinds; some are frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        for number, dtype in enumerate(DTYPES + OTHERS):
            for nbytes in range(dtype.itemsize, 18, dtype.itemsize):
                tensor = noise((nbytes // dtype.itemsize,), dtype, seed + number)
                self.register_buffer(f"b{number}_{nbytes}", tensor)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("number", torch.tensor(seed))
        self.complex = nn.Parameter(torch.rand(5, dtype=torch.complex64) + seed)
        self.narrow = nn.Parameter(torch.rand(64).add(seed).to(torch.float8_e4m3fn), requires_grad=False)
        self.transposed = nn.Parameter(torch.rand(16, 8).add(seed).t())
        self.channels = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.register_buffer("permuted", torch.rand(4, 5, 6).add(seed).permute(2, 0, 1))
        self.frozen = nn.Parameter(torch.rand(300).add(seed), requires_grad=False)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def kind_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


@pytest.mark.parametrize("meta", [False, True])
def test_b77_bytes_and_addresses_of_tensors_of_all_kinds(store: Path, meta: bool) -> None:
    model = Odd()
    tierload.save({"model": model}, store, settings=SMALL)
    with torch.device("meta" if meta else "cpu"):
        warm = Odd(1)
    kinds = [kind_of(one) for one in warm.state_dict(keep_vars=True).values()]
    before = [one.data_ptr() for one in warm.state_dict().values()]
    tierload.hot_start(store, warm).join()
    mine = warm.state_dict(keep_vars=True)
    for name, tensor in model.state_dict().items():
        assert raw(mine[name]) == raw(tensor), name
        assert mine[name].data_ptr() % tensor.dtype.itemsize == 0
        if meta and tensor.numel():
            assert mine[name].data_ptr() % 64 == 0, name
    if not meta:
        assert [kind_of(one) for one in mine.values()] == kinds
        assert [one.data_ptr() for one in mine.values()] == before


def test_strides_of_the_target_stay(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, warm = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    tierload.save({"model": model}, store)
    with held(monkeypatch) as go:
        tierload.hot_start(store, warm)
        go.set()
        assert torch.equal(warm.weight, model.weight)
    assert warm.weight.is_contiguous(memory_format=torch.channels_last)


class Flat(nn.Module):
    """Parameters that are parts of one flat tensor."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(8, 4))
        if flat:
            self.flat = torch.cat([self.a.detach().flatten(), self.b.detach().flatten()])
            self.a.data, self.b.data = self.flat[:16].view(4, 4), self.flat[16:].view(8, 4)


@pytest.mark.parametrize("stored", [False, True])
def test_parameters_over_one_flat_tensor_wait(store: Path, monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    """The flat one does not, and is right afterwards."""
    model, warm = Flat(stored), Flat(True)
    tierload.save({"model": model}, store, settings=SMALL)
    with held(monkeypatch) as go:
        boot = tierload.hot_start(store, warm)
        with pytest.raises(tierload.HotStartTimeout):
            boot.wait("b", 0.01)
        go.set()
        assert torch.equal(warm.b + 0, model.b)
        boot.join()
    assert_same(model, warm)
    assert torch.equal(warm.flat, torch.cat([model.a.detach().flatten(), model.b.detach().flatten()]))


def normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: norm(nn.Linear(8, 8)).eval()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": normed(parametrizations.weight_norm),
    "spectral_norm": normed(parametrizations.spectral_norm),
    "orthogonal": normed(parametrizations.orthogonal),
    "older weight_norm": normed(nn.utils.weight_norm),
    "older spectral_norm": normed(nn.utils.spectral_norm),
    "batch norm": lambda: nn.BatchNorm1d(8).eval(),
    "lazy": lambda: nn.LazyLinear(8),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_modules_that_compute_their_tensors(store: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Or make them at the first call: a lazy one takes those that are stored."""
    model = nn.Linear(8, 8) if name == "lazy" else MODULES[name]()
    tierload.save({"model": model}, store)
    warm = MODULES[name]()
    with held(monkeypatch) as go:
        tierload.hot_start(store, warm)
        go.set()
        assert torch.equal(warm(torch.ones(2, 8)), model(torch.ones(2, 8)))
    assert_alike(dict(warm.state_dict()), dict(model.state_dict()))
    assert not any(isinstance(one, nn.parameter.UninitializedParameter) for one in warm.parameters())


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_inference_tensors(store: Path, cast: bool, meta: bool) -> None:
    """Those of a target, and those that are made in inference mode; filled and converted beside it."""
    model = nn.Linear(8, 8)
    tierload.save({"model": model}, store)
    with torch.inference_mode(), torch.device("meta" if meta else "cpu"):
        warm = nn.Linear(8, 8, dtype=torch.float64 if cast else None)
    with torch.inference_mode():
        boot = tierload.hot_start(store, warm, cast=cast)
        found = warm(torch.ones(8, dtype=warm.weight.dtype))
        boot.join()
    assert warm.weight.is_inference()
    assert torch.equal(found, model.to(found.dtype)(torch.ones(8, dtype=found.dtype)))


def test_a_training_after_a_start_in_inference_mode(store: Path) -> None:
    model, _ = trained(store)
    warm, _ = fresh(2)
    with torch.inference_mode():
        boot = tierload.hot_start(store, warm)
        warm.eval()(WORDS)
        boot.join()
    assert_same(model, warm)
    warm(WORDS).sum().backward()
    assert not any(one.is_inference() for one in warm.parameters())


# -- ranks


class OfRanks(nn.Module):
    """Some of what two ranks have saved: spread over rows or columns, and copies of one another."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in whole(3).items():
            if isinstance(tensor, torch.Tensor) and not hasattr(self, name):
                self.register_buffer(name, torch.zeros_like(tensor))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("meta", [False, True])
def test_one_process_starts_from_what_ranks_have_saved(tmp_path: Path, step: int, meta: bool) -> None:
    path, _ = copied("ranks-1", tmp_path)
    with torch.device("meta" if meta else "cpu"):
        warm = OfRanks()
    boot = tierload.hot_start(path, warm, tag=f"step {step}", strict=False)
    assert boot.stages[0].told.endswith("pages of 2 shards, verified")
    found = {name: tensor.clone() for name, tensor in warm.named_buffers()}
    assert_alike(found, {name: whole(step)[name] for name in found})
    assert boot.join().missing == ()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_spread_over_ranks_is_there_at_once(store: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tierload.save({"model": model}, store)
    warm = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1,))
    warm[0].weight = nn.Parameter(distribute_tensor(warm[0].weight.detach(), mesh, [Shard(0)]))
    with held(monkeypatch) as go:
        boot = tierload.hot_start(store, warm)
        assert isinstance(warm[0].weight, DTensor)
        assert torch.equal(warm[0].weight.to_local(), model[0].weight)
        assert not boot.ready
        go.set()
    boot.join()
    assert torch.equal(warm[1].weight, model[1].weight)


# -- loaders of data


class Embedded(Dataset[torch.Tensor]):
    """Words as a model sees them."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(WORDS[:, at])
        return found


@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_use_what_arrives(store: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A forked worker reads it; to be sent to a spawned one, the model waits."""
    model, _ = trained(store)
    expected = [Embedded(model.words)[at] for at in range(4)]
    with held(monkeypatch) as go:
        warm, _ = fresh(2)
        boot = tierload.hot_start(store, warm)
        if way == "spawn":
            go.set()
        loader = DataLoader(Embedded(warm.words), batch_size=None, num_workers=2, multiprocessing_context=way)
        assert_alike(list(loader), expected)
        assert way == "spawn" or not boot.ready
    boot.join()
    assert_same(model, warm)
