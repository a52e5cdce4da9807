from __future__ import annotations

import json

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from alike import assert_alike, assert_tensor, raw
from fake_engine import load, round_trip, save
from hypothesis import given, settings

from tierload.errors import UnsupportedValue
from tierload.state.dtypes import BY_CODE, BY_DTYPE
from tierload.state.footprints import footprint_of

DTYPES = list(BY_DTYPE)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def of_bytes(shape, dtype, seed=0) -> torch.Tensor:
    """Any bits at all: nan payloads, odd bools excepted."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_table_of_dtypes():
    assert len(DTYPES) == 41, "torch 2.13 has every dtype of the format"
    assert BY_CODE[12].torch is torch.float32
    for row in BY_CODE.values():
        assert row.size == row.torch.itemsize
        assert row.item_size in (1, 2, 4, 8)
    rows = {row.name: (row.item_size, row.floating) for row in BY_CODE.values()}
    assert rows["complex32"] == (2, True)
    assert rows["complex64"] == (4, True)
    assert rows["complex128"] == (8, True)
    assert rows["bfloat16"] == (2, True)
    assert rows["int64"] == (8, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape(dtype, shape):
    tensor = of_bytes(shape, dtype)
    saved = save({"t": tensor})
    assert saved.nbytes == tensor.numel() * dtype.itemsize
    assert_tensor(load(saved)["t"], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_odd_layouts(dtype):
    state = {"t": of_bytes((6, 4), dtype, 2).t(), "gaps": of_bytes((4, 6), dtype, 1)[:, ::2]}
    loaded = round_trip(state)
    assert_tensor(loaded["t"], state["t"])
    assert_tensor(loaded["gaps"], state["gaps"], strides=False)


def test_b50_empty_and_0d():
    state = {"e": torch.tensor([]), "z1": torch.zeros(2, 0), "z2": torch.zeros(2, 0)}
    state["bf"] = torch.zeros(0, 5, dtype=torch.bfloat16)
    state["odd"] = torch.empty_strided((0, 3), (7, 2))
    for dtype in DTYPES:
        state[f"0d {dtype}"] = of_bytes((), dtype)
    assert_alike(round_trip(state), state)
    assert round_trip({}) == {}
    saved = save({"e": state["e"], "z": state["z1"]})
    assert saved.nbytes == 0
    assert saved.keys == ["e", "z"]
    empty = torch.zeros(0)
    assert len(save({"a": empty, "b": empty}).keys) == 1

    class Zero(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.5))

    assert round_trip({"m": Zero()})["m"]["scale"].item() == 2.5


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_b51_complex(dtype):
    tensor = of_bytes((3, 5), dtype)
    loaded = round_trip({"p": tensor, "conj": tensor.clone().conj()})
    assert_tensor(loaded["p"], tensor)
    assert loaded["conj"].is_conj()
    assert raw(loaded["conj"].conj()) == raw(tensor)


def test_b51_unsupported_fails_before_anything_is_written():
    for tensor, what in [
        (torch.ones(3).to_mkldnn(), "layout is torch._mkldnn"),
        (torch.nn.parameter.UninitializedParameter(), "subclass"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.empty((2, 3), device="meta", layout=torch.sparse_coo), "meta"),
    ]:
        with pytest.raises(UnsupportedValue) as caught:
            save({"cfg": [1, {"bad": tensor}]})
        assert "state['cfg'][1]['bad']" in str(caught.value)
        assert what in str(caught.value)


def test_meta_parameter_of_a_module_is_named():
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedValue, match="model/weight"):
        save({"model": module})


def test_b44_ties():
    embed = torch.randn(50, 8)
    flat = torch.arange(12.0)
    state = {"embed": embed, "lm_head": embed, "t": embed.t(), "a": flat[:5], "b": flat[5:]}
    saved = save(state)
    assert saved.keys == ["a", "b", "embed"], "one copy of the tied ones; disjoint slices apart"
    assert saved.nbytes == 50 * 8 * 4 + 12 * 4
    assert saved.infos[2].sizes == (50, 8)
    loaded = load(saved)
    assert_alike(loaded, state)
    assert loaded["embed"].data_ptr() == loaded["lm_head"].data_ptr() == loaded["t"].data_ptr()
    loaded["t"][0, 1] = 7
    assert loaded["embed"][1, 0] == 7
    assert not same_memory(loaded["a"], loaded["b"])
    for name in "ab":
        assert loaded[name].untyped_storage().nbytes() == loaded[name].nbytes


def test_b44_only_transposed_first_key():
    base = torch.randn(3, 4)
    loaded = round_trip({"a": base.t(), "b": base})
    assert_alike(loaded, {"a": base.t(), "b": base})
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_partly_overlapping_views_are_stored_once():
    flat = torch.arange(20.0)
    state = {"x": flat[2:10], "y": flat[6:14].view(2, 4), "z": flat[8:9]}
    saved = save(state)
    assert saved.keys == ["x"]
    assert saved.infos[0].sizes == (12,)
    loaded = load(saved)
    assert_alike(loaded, state)
    loaded["x"][6] = -1
    assert loaded["y"][0, 2] == -1
    assert loaded["z"][0] == -1


def test_views_of_other_dtypes_share_bytes():
    flat = torch.arange(8, dtype=torch.int32)
    state = {"bytes": flat.view(torch.uint8)[5:20], "ints": flat[2:], "half": flat.view(torch.bfloat16)[3:9]}
    saved = save(state)
    assert saved.keys == ["bytes"]
    assert saved.infos[0].dtype == 2
    loaded = load(saved)
    assert_alike(loaded, state)
    loaded["ints"][0] = 0
    assert loaded["bytes"][3:7].tolist() == [0, 0, 0, 0]


def test_same_shape_other_dtype_is_not_the_same_view():
    flat = torch.arange(4, dtype=torch.int32)
    loaded = round_trip({"f": flat.view(torch.float32), "i": flat})
    assert loaded["f"].dtype is torch.float32
    assert loaded["i"].tolist() == [0, 1, 2, 3]
    assert same_memory(loaded["f"], loaded["i"])


def test_b47_small_views_of_large_buffers():
    x = torch.arange(10**6, dtype=torch.float32)
    state = {"a": x[:10], "b": x.narrow(0, 5, 10), "c": x[::1000], "e": x[:1].expand(1000)}
    saved = save(state)
    assert saved.nbytes == 15 * 4 + 1000 * 4
    assert any("share memory" in note for note in saved.notes)
    loaded = load(saved)
    assert loaded["e"].stride() == (0,)
    assert loaded["a"][5:].tolist() == loaded["b"][:5].tolist() == [5, 6, 7, 8, 9]
    assert loaded["a"].data_ptr() + 20 == loaded["b"].data_ptr()
    for name, tensor in state.items():
        assert_tensor(loaded[name], tensor, strides=name != "c")
    assert save({"a": x[:10]}).nbytes == 40
    assert save({"c": x[::1000]}).nbytes == 4000
    assert save({"e": x[:1].expand(1000)}).nbytes == 4


def test_interleaved_views_share_one_buffer():
    x = torch.arange(12.0).view(3, 4)
    state = {f"c{i}": x[:, i] for i in range(4)}
    saved = save(state)
    assert saved.nbytes == 48
    loaded = load(saved)
    assert_alike(loaded, state)
    assert same_memory(loaded["c0"], loaded["c3"])


def test_equal_views_with_gaps_stay_tied_also_transposed():
    x = torch.randn(6, 1000)
    state = {"a": x[:, ::100], "b": x[:, ::100].t(), "c": x[:, ::100].unsqueeze(1)}
    saved = save(state)
    assert saved.keys == ["a"]
    assert saved.nbytes == 240
    loaded = load(saved)
    for name, tensor in state.items():
        assert_tensor(loaded[name], tensor, strides=False)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() == loaded["c"].data_ptr()
    assert loaded["a"].is_contiguous()
    assert loaded["b"].stride() == (1, 10)


def test_a_view_that_overlaps_itself():
    windows = torch.arange(10.0).unfold(0, 4, 1)
    saved = save({"w": windows})
    assert saved.nbytes == 40
    assert_alike(load(saved)["w"], windows)
    scattered = torch.arange(4000.0).as_strided((2, 3), (1000, 999))
    saved = save({"w": scattered})
    assert saved.nbytes == 24
    assert saved.notes
    assert_tensor(load(saved)["w"], scattered, strides=False)


def test_b49_layouts_are_restored_without_a_copy():
    conv = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    conv3 = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    state = {
        "cl": conv,
        "cl3": conv3,
        "tT": torch.randn(3, 4).t().T,
        "perm": torch.randn(2, 3, 4).permute(2, 0, 1),
        "zero": torch.randn(3, 1).expand(3, 5),
        "odd": torch.randn(6).as_strided((2, 1, 3), (3, 17, 1)),
        "ones": torch.randn(1, 3, 1, 1).to(memory_format=torch.channels_last),
    }
    from tierload.state import flatten

    flat = flatten(state)
    pointers = dict(zip((info.key for info in flat.chunks.infos()), flat.pointers.tolist(), strict=True))
    assert pointers == {name: tensor.data_ptr() for name, tensor in state.items()}
    saved = save(state)
    assert saved.infos[saved.keys.index("cl")].sizes == (4, 5, 6, 3)
    loaded = load(saved)
    assert_alike(loaded, state)
    assert loaded["cl"].is_contiguous(memory_format=torch.channels_last)
    tail = torch.randn(4, 5)[1:, 2:].flip(0)
    assert_tensor(round_trip({"t": tail})["t"], tail, strides=False)


def test_conj_and_neg_bits():
    z = torch.randn(4, dtype=torch.complex64)
    state = {"c": z.clone().conj(), "n": z.clone().conj().imag, "g": z.clone().conj().imag[::2]}
    assert state["n"].is_neg()
    loaded = round_trip(state)
    for name, tensor in state.items():
        assert_tensor(loaded[name], tensor, strides=False)


def test_parameters_and_gradients():
    shared = torch.nn.Parameter(torch.randn(3))
    state = {
        "p": shared,
        "q": shared,
        "d": shared.detach(),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "ints": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "g": torch.ones(2, requires_grad=True),
        "graph": torch.ones(2, requires_grad=True) * 2,
    }
    loaded = round_trip(state)
    for name in ("p", "frozen", "ints"):
        assert type(loaded[name]) is torch.nn.Parameter
        assert loaded[name].requires_grad == state[name].requires_grad
    assert loaded["p"] is loaded["q"], "a tied parameter is one object"
    assert loaded["d"] is not loaded["p"]
    assert loaded["d"].data_ptr() == loaded["p"].data_ptr()
    assert loaded["graph"].is_leaf
    assert loaded["graph"].requires_grad
    assert loaded["graph"].tolist() == [2, 2]
    loaded["p"].sum().backward()


def test_two_wrappers_of_the_same_numpy_memory():
    array = np.arange(10, dtype=np.float32)
    state = {"a": torch.from_numpy(array), "b": torch.from_numpy(array[2:])}
    saved = save(state)
    assert saved.nbytes == 40
    loaded = load(saved)
    assert_alike(loaded, state)
    assert same_memory(loaded["a"], loaded["b"])


def test_memory_at_odd_addresses():
    data = np.zeros(41, np.uint8)
    floats = torch.frombuffer(data.data, dtype=torch.float32, offset=1, count=8)
    floats.copy_(torch.arange(8.0))
    ints = torch.frombuffer(data.data, dtype=torch.int32, offset=4, count=4)
    state = {"f": floats, "i": ints}
    loaded = round_trip(state)
    for name, tensor in state.items():
        assert raw(loaded[name]) == raw(tensor)


def test_the_document_is_deterministic_and_sorted():
    state = {"b": torch.ones(2), "a": {"é": torch.ones(1), "z": torch.ones(1), "\U0001f600": torch.ones(1)}}
    saved, again = save(state), save(state)
    assert saved.keys == ["a/z", "a/é", "a/\U0001f600", "b"]
    assert (saved.document, saved.data) == (again.document, again.data)
    root = json.loads(saved.document)["root"]["d"]
    assert root["b"] == {"t": {"chunk": 3, "shape": [2]}}
    assert saved.document.isascii()


@st.composite
def view_of(draw, base: torch.Tensor):
    """A random strided view inside a one-dimensional base."""
    size = base.numel()
    shape, stride, room = [], [], size - 1
    offset = draw(st.integers(0, room))
    room -= offset
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.integers(0, 9))
        count = draw(st.integers(0, 4))
        if count > 1 and step * (count - 1) > room:
            count = 1
        room -= step * max(count - 1, 0)
        shape.append(count)
        stride.append(step)
    return base.as_strided(shape, stride, offset)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_views_of_one_buffer(data):
    base = torch.arange(40, dtype=torch.int32)
    views = data.draw(st.lists(view_of(base), min_size=1, max_size=6))
    state = {f"k{number}": view for number, view in enumerate(views)}
    saved = save(state)
    loaded = load(saved)
    for name, view in state.items():
        assert loaded[name].shape == view.shape
        assert loaded[name].tolist() == view.tolist()
        owner = saved.infos
        assert len(owner) <= len(state)
    # Dense views that meet in memory meet again when loaded.
    prints = {name: footprint_of(v.data_ptr(), v.shape, v.stride(), 4) for name, v in state.items() if v.numel()}
    for one, first in prints.items():
        for two, second in prints.items():
            if first.dense and second.dense and first.start < second.end and second.start < first.end:
                assert same_memory(loaded[one], loaded[two])
                assert loaded[two].data_ptr() - loaded[one].data_ptr() == second.start - first.start


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_dense_permutation_keeps_its_strides(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn(shape).permute(order)
    saved = save({"t": tensor})
    assert saved.nbytes == tensor.nbytes
    assert_tensor(load(saved)["t"], tensor)
