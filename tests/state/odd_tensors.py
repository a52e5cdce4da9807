"""Strategies for tensors that are made of others, and wrapper subclasses for tests."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch

VALUE_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e5m2,
]


class Scaled(torch.Tensor):
    """A wrapper subclass: integers and a scale that say they are floats, and a name beside them."""

    inner: torch.Tensor
    scale: torch.Tensor
    label: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor, label: Any = None) -> Scaled:
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=torch.float32)
        out.inner, out.scale, out.label = inner, scale, label
        return out

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", "scale"], self.label

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["inner"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return type(args[0])(args[0].inner, args[0].scale, args[0].label)
        raise NotImplementedError(str(func))


class Outer(Scaled):
    """One whose inner tensor is a wrapper itself."""


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for size in shape:
        count *= size
    data = torch.randint(0, 256, (count,), generator=source, dtype=torch.uint8)
    if dtype is torch.bool:
        data &= 1
    return (data.view(dtype) if count else torch.empty(0, dtype=dtype)).view(shape)


SEEDS = st.integers(0, 1000)
DTYPES = st.sampled_from(VALUE_DTYPES)


@st.composite
def coo(draw: st.DrawFn) -> torch.Tensor:
    sparse = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dense = draw(st.lists(st.integers(0, 3), max_size=2))
    count = draw(st.integers(0, 8))
    indices = torch.tensor(
        [[draw(st.integers(0, size - 1)) for _ in range(count)] for size in sparse], dtype=torch.int64
    ).reshape(len(sparse), count)
    values = noise((count, *dense), draw(DTYPES), draw(SEEDS))
    tensor = torch.sparse_coo_tensor(indices, values, (*sparse, *dense), check_invariants=True)
    if values.dtype in (torch.float32, torch.int64) and draw(st.booleans()):
        return tensor.coalesce()
    return tensor


@st.composite
def compressed(draw: st.DrawFn) -> torch.Tensor:
    layout = draw(st.sampled_from([torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]))
    blocks = layout in (torch.sparse_bsr, torch.sparse_bsc)
    height, width = (draw(st.sampled_from([1, 2])) for _ in range(2)) if blocks else (1, 1)
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    mask = [[draw(st.booleans()) for _ in range(columns)] for _ in range(rows)]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        lines = [[row for row in range(rows) if mask[row][column]] for column in range(columns)]
    else:
        lines = [[column for column in range(columns) if line[column]] for line in mask]
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    plain = torch.tensor([at for line in lines for at in line], dtype=index)
    values = noise((len(plain), *((height, width) if blocks else ())), draw(DTYPES), draw(SEEDS))
    size = (rows * height, columns * width)
    return torch.sparse_compressed_tensor(
        torch.tensor(starts, dtype=index), plain, values, size, layout=layout, check_invariants=True
    )


@st.composite
def quantized(draw: st.DrawFn) -> torch.Tensor:
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    data = torch.randn(shape, generator=torch.Generator().manual_seed(draw(SEEDS)))
    kind = draw(st.sampled_from(["tensor", "transposed", "channel", "float channel", "packed", "packed channel"]))
    dtype = draw(st.sampled_from([torch.qint8, torch.quint8, torch.qint32]))
    zero = draw(st.integers(0, 9))
    if kind in ("tensor", "transposed"):
        tensor = torch.quantize_per_tensor(data, draw(st.floats(1e-6, 1e6)), zero, dtype)
        return tensor.t() if kind == "transposed" else tensor
    if kind == "packed":
        return torch.quantize_per_tensor(data, 0.25, zero, torch.quint4x2)
    axis = draw(st.integers(0, 1)) if kind == "channel" else 0
    scales = torch.rand(shape[axis], dtype=torch.float64) + 0.1
    if kind == "channel":
        return torch.quantize_per_channel(data, scales, torch.full((shape[axis],), zero), axis, dtype)
    zeros = torch.rand(shape[axis])
    kinds = torch.quint8 if kind == "float channel" else torch.quint4x2
    return torch.quantize_per_channel(data, scales.float(), zeros, axis, kinds)


@st.composite
def nested(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]))
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    pieces = [noise((length, 3), dtype, draw(SEEDS)) for length in lengths]
    if draw(st.booleans()):
        tensor = torch.nested.nested_tensor(pieces, layout=torch.strided)
        return tensor.transpose(1, 2) if 0 not in lengths and draw(st.booleans()) else tensor
    tensor = torch.nested.nested_tensor(pieces, layout=torch.jagged)
    if draw(st.booleans()):
        return tensor.transpose(1, 2)
    if draw(st.booleans()):
        starts = torch.tensor([0] * len(lengths))
        base = noise((len(lengths), 4, 3), dtype, draw(SEEDS))
        return torch.nested.narrow(base, 1, starts, torch.tensor(lengths), layout=torch.jagged)
    return tensor


@st.composite
def marked(draw: st.DrawFn, kinds: st.SearchStrategy[torch.Tensor]) -> torch.Tensor:
    """As it is, with a gradient, or as a parameter."""
    tensor = draw(kinds)
    differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    how = draw(st.sampled_from(["", "grad", "parameter", "frozen"]))
    if how == "grad" and differentiable:
        return tensor.requires_grad_()
    if how == "parameter" and differentiable:
        return torch.nn.Parameter(tensor)
    return torch.nn.Parameter(tensor, requires_grad=False) if how == "frozen" else tensor


@st.composite
def wrapped(draw: st.DrawFn) -> torch.Tensor:
    """A wrapper around random tensors, or around another wrapper."""
    labels = (
        st.none() | st.text(max_size=3) | st.lists(st.integers(), max_size=2) | st.sampled_from([torch.float16, ()])
    )
    inner: torch.Tensor = noise(tuple(draw(st.lists(st.integers(0, 3), max_size=3))), draw(DTYPES), draw(SEEDS))
    if inner.dim() > 1 and draw(st.booleans()):
        inner = inner.transpose(0, 1)
    scale = draw(st.one_of(coo(), quantized(), st.builds(noise, st.just((2,)), DTYPES, SEEDS)))
    made = Scaled(inner, scale, draw(labels))
    return Outer(made, scale, draw(labels)) if draw(st.booleans()) else made


ODD = marked(st.one_of(coo(), compressed(), quantized(), nested()))


def examples() -> dict[str, torch.Tensor]:
    """One of each form, fixed."""
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    pieces = [torch.arange(6.0).view(2, 3), torch.ones(3, 3)]
    scales, zeros = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64), torch.tensor([0, 1, 2])
    data = torch.arange(15.0).view(3, 5) / 7
    eye = torch.eye(4)
    return {
        "coo": torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (2, 3)),
        "coalesced": torch.eye(3).to_sparse(),
        "hybrid": torch.sparse_coo_tensor(indices[:1], torch.randn(3, 2), (2, 2)),
        "empty": torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (2, 3)),
        "csr": eye.to_sparse_csr(),
        "csc": eye.to_sparse_csc(),
        "bsr": eye.to_sparse_bsr((2, 2)),
        "bsc": eye.to_sparse_bsc((2, 2)),
        "batched": eye.repeat(2, 1, 1).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(data, 0.1, 3, torch.quint8),
        "channels": torch.quantize_per_channel(data, scales, zeros, 0, torch.qint8),
        "packed": torch.quantize_per_channel(data, scales.float(), zeros.float(), 0, torch.quint4x2),
        "nested": torch.nested.nested_tensor(pieces, layout=torch.strided),
        "no components": torch.nested.nested_tensor([], dtype=torch.float64, layout=torch.strided),
        "jagged": torch.nested.nested_tensor(pieces, layout=torch.jagged),
        "parameter": torch.nn.Parameter(torch.eye(3).to_sparse()),
    }
