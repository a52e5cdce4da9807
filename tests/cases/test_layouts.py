"""B44, B45, B47 and B49: tied weights, views of large buffers, and strides."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.cases.memory import peak
from tests.cases.stores import SMALL, let_go, sizes
from tests.state.alike import assert_tensor
from tests.state.models import TinyLM, train
from tierload import Settings

SETTINGS = [
    Settings(compression="fast"),
    Settings(compression="small", threads=2),
    Settings(compression="off"),
    SMALL,
]


def round_trip(path: Path, state: Any, settings: Settings | None = None) -> Any:
    tierload.save(state, path, settings=settings)
    let_go(path)
    return tierload.load(path)


# -- B44


def test_b44_tied_tensors_are_stored_once_and_tied_again(store: Path) -> None:
    embed = torch.randn(400, 128)
    flat = torch.randn(60_000)
    state = {
        "embed": embed,
        "lm_head": embed,
        "transposed": embed.t(),
        "first": flat[:20_000],
        "second": flat[30_000:].view(100, 300),
    }
    report = tierload.save(state, store, settings=Settings(compression="off", pack_below_bytes=0))
    needed = embed.nbytes + 4 * 50_000
    assert report.raw_bytes == needed
    assert needed <= sizes(store, "seg") <= needed + 3 * 4096
    let_go(store)
    found = tierload.load(store)
    for name, tensor in state.items():
        assert_tensor(found[name], tensor)
    assert found["embed"].data_ptr() == found["lm_head"].data_ptr() == found["transposed"].data_ptr()
    found["lm_head"][3, 5] = 7.0
    assert found["transposed"][5, 3] == 7.0
    assert found["first"].data_ptr() != found["second"].data_ptr()
    found["first"].zero_()
    assert torch.equal(found["second"], state["second"])


def test_b44_aliases_stay_when_loaded_into_a_dict(store: Path) -> None:
    embed = torch.randn(40, 12)
    tierload.save({"embed": embed, "lm_head": embed}, store)
    shared = torch.zeros(40, 12)
    target = {"embed": shared, "lm_head": shared}
    tierload.load(store, into=target)
    assert target["embed"] is target["lm_head"] is shared
    assert torch.equal(shared, embed)


# -- B45


@pytest.mark.parametrize("way", ["into meta", "into", "state dict, assign", "state dict, copy"])
def test_b45_ties_survive_every_way_of_loading(store: Path, way: str) -> None:
    torch.manual_seed(0)
    reference = TinyLM()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), 3)
    tierload.save({"model": reference}, store)
    let_go(store)
    with torch.device("meta" if way == "into meta" else "cpu"):
        model = TinyLM()
    if way.startswith("into"):
        tierload.load(store, into={"model": model})
    else:
        model.load_state_dict(tierload.load(store)["model"], assign="assign" in way)
        if "assign" in way:
            assert model.embed.weight.data_ptr() == model.head.weight.data_ptr()
            return
    assert model.embed.weight is model.head.weight
    assert len(list(model.named_parameters())) == len(list(reference.named_parameters()))
    losses = [train(m, torch.optim.AdamW(m.parameters(), lr=0.01), 5, seed=1) for m in (model, reference)]
    assert losses[0] == losses[1]
    assert model.embed.weight is model.head.weight


# -- B47


def views_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": x[:10], "b": x.narrow(0, 5, 10), "c": x[::1000], "e": x[:1].expand(1000)}


def check_views(path: Path, count: int) -> None:
    x = torch.zeros(count)
    x[:15] = torch.arange(15.0)
    x[1000:50_000:1000] = 3.0
    state = views_of(x)
    logical = 4 * (15 + len(state["c"]) + 1)
    with peak() as extra:
        report = tierload.save(state, path)
    assert report.raw_bytes <= logical + 4096
    assert sizes(path, "seg") <= logical + 4 * 4096
    let_go(path)
    found = tierload.load(path)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].shape == tensor.shape
    assert found["e"].shape == (1000,)
    assert sum(t.untyped_storage().nbytes() for t in (found["a"], found["c"])) < 3 * logical + 4096
    assert extra[0] < 2 * logical + (64 << 20)


def test_b47_views_of_a_large_buffer(store: Path) -> None:
    """Only what they show is stored. (The peak says nothing here: the buffer itself is small.)"""
    check_views(store, 10**6)


@pytest.mark.slow
def test_b47_views_of_a_very_large_buffer(store: Path) -> None:
    """400 MB; reading every 1000th element makes nearly all of its zero pages resident, which is torch's doing."""
    x = torch.zeros(10**8)
    x[::1000] = 1.0
    del x
    check_views(store, 10**8)


def test_b47_ten_of_ten_million(store: Path) -> None:
    x = torch.randn(10**7)
    with peak() as extra:
        tierload.save({"slice": x[5_000_000:5_000_010]}, store)
    assert sum(path.stat().st_size for path in store.rglob("*") if path.parent.name in ("seg", "man")) < 20_000
    assert extra[0] < 16 << 20
    assert torch.equal(tierload.load(store)["slice"], x[5_000_000:5_000_010])


# -- B49


def odd_layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(2 * 3 * 4 * 5 * 6, dtype=torch.float32)
    five, four, two = base.view(2, 3, 4, 5, 6), base.view(6, 4, 5, 6), base.view(24, 30)
    return {
        "channels_last": nn.Conv2d(4, 6, 3).weight.detach().to(memory_format=torch.channels_last),
        "channels_last_3d": nn.Conv3d(4, 6, 3).weight.detach().to(memory_format=torch.channels_last_3d),
        "image": four.clone().to(memory_format=torch.channels_last),
        "volume": five.clone().to(memory_format=torch.channels_last_3d),
        "t": two.clone().t(),
        "t.T": two.clone().t().T,
        "permuted": five.clone().permute(3, 0, 4, 1, 2),
        "every other": two.clone()[::2, 1::3],
        "from the end": two.clone()[-5:-1, -7:],
        "flipped": two.clone().flip(0, 1),
        "stride 0": torch.randn(1, 5).expand(7, 5),
        "stride 0 inside": torch.randn(4, 1, 3).expand(4, 6, 3),
        "diagonal": two.clone().diagonal(),
        "unfolded": base[:40].clone().unfold(0, 8, 3),
        "size 1, odd strides": torch.as_strided(base.clone(), (1, 5, 1, 4), (77, 4, 13, 1)),
        "size 1 of channels_last": torch.randn(1, 1, 5, 5).to(memory_format=torch.channels_last),
        "offset": base.clone()[7:].view(-1),
    }


DENSE = ("channels_last", "channels_last_3d", "image", "volume", "t", "t.T", "permuted", "offset", "flipped")


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.compression}-{s.page_bytes}")
def test_b49_strides_and_values(store: Path, settings: Settings) -> None:
    state = odd_layouts()
    found = round_trip(store, state, settings)
    for name, tensor in state.items():
        assert_tensor(found[name], tensor, strides=name in DENSE)
    assert found["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert found["channels_last_3d"].is_contiguous(memory_format=torch.channels_last_3d)


def test_b49_into_targets_of_another_layout(store: Path) -> None:
    state = odd_layouts()
    tierload.save(state, store)
    targets = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    tierload.load(store, into=targets)
    for name, tensor in state.items():
        assert torch.equal(targets[name], tensor), name
        assert targets[name].is_contiguous()
    plain = nn.Conv2d(4, 6, 3)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    tierload.save({"conv": plain}, store)
    nn.init.zeros_(last.weight)
    tierload.load(store, into={"conv": last})
    assert torch.equal(last.weight, plain.weight)
    assert last.weight.is_contiguous(memory_format=torch.channels_last)


def test_b49_no_second_copy_of_a_dense_layout(store: Path) -> None:
    """64 MiB in channels_last and 64 MiB transposed are saved from where they lie, and loaded to where they go."""
    state = {
        "image": torch.randn(16, 64, 128, 128).to(memory_format=torch.channels_last),
        "matrix": torch.randn(4096, 4096).t(),
    }
    settings = Settings(compression="off", threads=1)
    with peak() as saving:
        tierload.save(state, store, settings=settings)
    assert saving[0] < 40 << 20
    let_go(store)
    with peak() as loading:
        found = tierload.load(store)
    assert loading[0] < (128 << 20) + (40 << 20)
    for name, tensor in state.items():
        assert_tensor(found[name], tensor)
