"""Any state, out and back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import tierload
from tests.cases.stores import let_go
from tests.convert.convert_support import export
from tests.state.alike import assert_alike, raw

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64)
NAMES = st.text(st.characters(exclude_categories=()), max_size=4)


@st.composite
def a_tensor(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    kind = draw(st.sampled_from(["plain", "turned", "stepped"]))
    if kind == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    return tensor[::2] if kind == "stepped" and tensor.dim() else tensor


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | NAMES | st.binary(min_size=1, max_size=5)
TREE = st.recursive(
    a_tensor() | SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES, TREE, max_size=4))
def test_any_state_through_a_file_of_torch(state: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = export(state, Path(folder, "a.pt"))
        assert (report.left_out, report.changed) == ((), ())
        stored = tierload.load(Path(folder, "a.pt.store"))
        assert_alike(torch.load(Path(folder, "a.pt"), weights_only=True), stored)
        tierload.import_state(Path(folder, "a.pt"), Path(folder, "back"))
        assert_alike(tierload.load(Path(folder, "back")), stored)
        let_go(Path(folder))


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES, a_tensor() | SCALARS, max_size=6))
def test_any_flat_state_through_safetensors(state: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = export(state, Path(folder, "a.safetensors"))
        left_out = {key for key, _ in report.left_out}
        assert all(any("\ud800" <= letter <= "\udfff" for letter in key) for key in left_out)
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        found = load_file(Path(folder, "a.safetensors"))
        assert len(found) == len(tensors) - len(left_out)
        tierload.import_state(Path(folder, "a.safetensors"), Path(folder, "back"))
        back = tierload.load(Path(folder, "back"))
        assert back.keys() <= state.keys()
        assert len(back) == len(state) - len(left_out)
        for key, value in back.items():
            if key in tensors:
                assert raw(value) == raw(found[key]) == raw(tensors[key])
                assert (value.dtype, value.shape) == (tensors[key].dtype, tensors[key].shape)
            else:
                assert_alike(value, state[key])
        let_go(Path(folder))
