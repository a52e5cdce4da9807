"""Exact comparison of states: types, structure, order, bits, shapes, strides."""

from __future__ import annotations

import collections
import dataclasses
import re
import struct

import numpy as np
import torch

from tierload.state import LazyTensor

_SHELL = re.compile(r"torch\.(u?int[1-7]|bits\w+)")  # no operator but view knows these


def raw(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, bit for bit, for any dtype."""
    if _SHELL.fullmatch(str(tensor.dtype)):
        return raw(tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16))
    bare = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = bare.as_strided((bare.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8).numpy().tobytes() if bare.numel() else b""


def assert_tensor(got: torch.Tensor, want: torch.Tensor, strides: bool = True) -> None:
    assert type(got) is type(want)
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    if strides:
        assert got.stride() == want.stride()
    assert got.requires_grad == want.requires_grad
    assert got.is_leaf
    assert got.is_conj() == want.is_conj()
    assert got.is_neg() == want.is_neg()
    assert raw(got) == raw(want)


def assert_compound(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same by what torch itself says of sparse, quantized and nested tensors."""
    assert type(got) is type(want)
    assert (got.layout, got.dtype, got.is_nested, got.is_quantized) == (
        want.layout,
        want.dtype,
        want.is_nested,
        want.is_quantized,
    )
    assert isinstance(got, torch.nn.Parameter) == isinstance(want, torch.nn.Parameter)
    assert got.requires_grad == want.requires_grad
    got, want = got.detach(), want.detach()
    if want.layout is torch.jagged:
        assert got._ragged_idx == want._ragged_idx
        assert_tensor(got._values, want._values)
        assert_tensor(got.offsets(), want.offsets())
        assert (got.lengths() is None) == (want.lengths() is None)
        if want.lengths() is not None:
            assert_tensor(got.lengths(), want.lengths())
    elif want.is_nested:
        assert got.dim() == want.dim()
        for one, other in zip(got.unbind(), want.unbind(), strict=True):
            assert_tensor(one, other, strides=False)
    elif want.is_quantized:
        assert got.shape == want.shape
        assert got.qscheme() == want.qscheme()
        assert_tensor(got.int_repr(), want.int_repr(), strides=False)
        if want.qscheme() is torch.per_tensor_affine:
            assert (got.q_scale(), got.q_zero_point()) == (want.q_scale(), want.q_zero_point())
        else:
            assert got.q_per_channel_axis() == want.q_per_channel_axis()
            assert_tensor(got.q_per_channel_scales(), want.q_per_channel_scales())
            assert_tensor(got.q_per_channel_zero_points(), want.q_per_channel_zero_points())
    else:
        assert got.shape == want.shape
        if want.layout is torch.sparse_coo:
            assert got.is_coalesced() == want.is_coalesced()
            names = ("_indices", "_values")
        elif want.layout in (torch.sparse_csr, torch.sparse_bsr):
            names = ("crow_indices", "col_indices", "values")
        else:
            names = ("ccol_indices", "row_indices", "values")
        for name in names:
            assert_tensor(getattr(got, name)(), getattr(want, name)(), strides=False)


def assert_alike(got, want, where="state", seen=None) -> None:
    seen = set() if seen is None else seen
    if (id(got), id(want)) in seen:
        return
    seen.add((id(got), id(want)))
    assert type(got) is type(want), f"{where}: {type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        is_strided = want.layout is torch.strided and not want.is_nested and not want.is_quantized
        (assert_tensor if is_strided else assert_compound)(got, want)
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype, where
        assert got.shape == want.shape, where
        assert got.flags.f_contiguous == want.flags.f_contiguous or not want.flags.c_contiguous, where
        assert got.tobytes() == want.tobytes(), where
    elif isinstance(want, np.generic):
        assert got.dtype == want.dtype, where
        assert got.tobytes() == want.tobytes(), where
    elif isinstance(want, float):
        assert struct.pack("<d", got) == struct.pack("<d", want), where
    elif isinstance(want, complex):
        assert_alike(got.real, want.real, where, seen)
        assert_alike(got.imag, want.imag, where, seen)
    elif isinstance(want, dict):
        assert len(got) == len(want), where
        for (one, a), (two, b) in zip(got.items(), want.items(), strict=True):
            assert_alike(one, two, f"{where} key", set())
            assert_alike(a, b, f"{where}[{two!r}]", seen)
        if isinstance(want, collections.defaultdict):
            assert got.default_factory is want.default_factory, where
    elif isinstance(want, (list, tuple, collections.deque)):
        assert len(got) == len(want), where
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_alike(a, b, f"{where}[{number}]", seen)
        if isinstance(want, collections.deque):
            assert got.maxlen == want.maxlen, where
    elif dataclasses.is_dataclass(want):
        for field in dataclasses.fields(want):
            assert_alike(getattr(got, field.name), getattr(want, field.name), f"{where}.{field.name}", seen)
    else:
        assert got == want or (got != got and want != want), where


def materialised(state):
    """The state with what its lazy tensors are; dicts stay the same objects."""
    if isinstance(state, LazyTensor):
        return state.materialise()
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = materialised(value)
        return state
    return type(state)(map(materialised, state)) if type(state) in (list, tuple) else state
