"""Exact comparison of states: types, structure, order, bits, shapes, strides."""

from __future__ import annotations

import collections
import dataclasses
import struct

import numpy as np
import torch


def raw(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, bit for bit, for any dtype."""
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


def assert_alike(got, want, where="state", seen=None) -> None:
    seen = set() if seen is None else seen
    if (id(got), id(want)) in seen:
        return
    seen.add((id(got), id(want)))
    assert type(got) is type(want), f"{where}: {type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        assert_tensor(got, want)
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
