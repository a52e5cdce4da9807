"""Hostile documents and chunk tables on the native way back: only the documented errors, and never a wrong tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import hypothesis.strategies as st
import pytest
import torch
from fake_engine import Saved, bind, load, run, table
from hypothesis import given, settings
from two_ways import outcome, python_way

from tierload import _native
from tierload.errors import CorruptStore, KeyMismatch, UnsupportedValue
from tierload.state import plan_bind, plan_load
from tierload.state.tensors import TORCH
from tierload.types import ChunkInfo, ChunkTable, LoadReport

FLOATS = ChunkInfo(0, "a", 12, (2, 3), (0, 0), (2, 3), 24)
BYTES = ChunkInfo(1, "b", 2, (8,), (0,), (8,), 8)
SCALAR = ChunkInfo(2, "c", 12, (), (), (), 4)
INFOS = [FLOATS, BYTES, SCALAR]
DATA = [bytes(range(24)), bytes(range(100, 108)), b"\0\0\x80\x3f"]
DAMAGED = (CorruptStore, KeyMismatch, UnsupportedValue, MemoryError)


def saved_with(root: object, chunks: ChunkTable | None = None) -> Saved:
    text = root if isinstance(root, str) else json.dumps(root)
    return Saved(f'{{"version":1,"root":{text}}}'.encode(), table(INFOS) if chunks is None else chunks, DATA, ())


def done(report: LoadReport) -> str:
    """A report; the names of what was loaded are those of the chunks or those of the document, which differ here."""
    return repr(dataclasses.replace(report, loaded=report.loaded[:0]))


def targets() -> dict:
    return {"x": torch.zeros(2, 3), "y": torch.zeros(8, dtype=torch.uint8), "z": torch.zeros(())}


NUMBERS = ["0", "1", "2", "3", "-1", "true", "false", "null", "0.0", "1e0", '"0"', "[]", "{}"]
NUMBERS += ["9223372036854775807", "-9223372036854775808", "4294967296", "18446744073709551616"]
SHAPES = [
    "[2,3]",
    "[8]",
    "[]",
    "[3,2]",
    "[6]",
    "[2,3,1]",
    "[2.0,3]",
    "[true,3]",
    "[2]",
    "[-2,-3]",
    "null",
    '"23"',
    "{}",
]
SHAPES += ["[9223372036854775807,2]", "[[2,3]]", '["2",3]', "[2,null]", "[18446744073709551616,3]", "[4294967298,3]"]


@pytest.mark.parametrize("wrap", ['{{"d":{{"x":{}}}}}', "[{}]", '{{"map":[[1,{}]]}}', '{{"odict":[["x",{}]]}}', "{}"])
def test_chunk_numbers_and_shapes(wrap):
    for number, shape in itertools.product(NUMBERS, SHAPES):
        right = (number, shape) in (("0", "[2,3]"), ("1", "[8]"), ("2", "[]"))
        reshaped = number == "0" and shape in ("[3,2]", "[6]", "[2,3,1]")
        for members in (f'"chunk":{number},"shape":{shape}', f'"shape":{shape},"chunk":{number}'):
            saved = saved_with(wrap.format(f'{{"t":{{{members}}}}}'))
            native = outcome(lambda s=saved: repr(load(s)))
            with python_way():
                assert outcome(lambda s=saved: repr(load(s))) == native
            assert native.startswith("CorruptStore") == (not right and not reshaped), (members, native)
    for live in targets().values():
        for number, shape in itertools.product(NUMBERS, SHAPES):
            saved = saved_with(f'{{"d":{{"x":{{"t":{{"chunk":{number},"shape":{shape}}}}}}}}}')
            native = outcome(lambda s=saved, t=live: done(bind(s, {"x": t})))
            with python_way():
                assert outcome(lambda s=saved, t=live: done(bind(s, {"x": t}))) == native


@pytest.mark.parametrize(
    "content",
    [
        {"chunk": 0, "shape": [2, 3], "extra": 1},
        {"chunk": 0, "shape": [2, 3], "grad": 1},
        {"chunk": 0, "Shape": [2, 3]},
        {"chunk": 0},
        {"shape": [2, 3]},
        {"chunk": 0, "chunk ": 0, "shape": [2, 3]},
        [0, [2, 3]],
        0,
        None,
    ],
)
def test_other_members(content):
    for root in ({"d": {"x": {"t": content}}}, [{"t": content}], {"map": [[1, {"t": content}]]}):
        with pytest.raises(CorruptStore):
            load(saved_with(root))
    for live in targets().values():
        with pytest.raises((CorruptStore, KeyMismatch)):
            bind(saved_with({"d": {"x": {"t": content}}}), {"x": live})


T0 = {"t": {"chunk": 0, "shape": [2, 3]}}
T1 = {"t": {"chunk": 1, "shape": [8]}}
USES = {
    "plain": T1,
    "turned": {"t": {"shape": [8], "chunk": 1}},
    "view": {"t": {"chunk": 1, "shape": [4], "stride": [2], "offset": 0}},
    "reshaped": {"t": {"chunk": 1, "shape": [2, 4]}},
    "other dtype": {"t": {"chunk": 1, "shape": [2], "dtype": "float32"}},
    "parameter": {"t": {"chunk": 1, "shape": [8], "neg": True}},
    "blob": {"blob": {"chunk": 1, "as": "bytes"}},
    "bytearray": {"blob": {"chunk": 1, "as": "bytearray"}},
    "array": {"ndarray": {"chunk": 1, "dtype": "<f4", "shape": [2], "order": "C"}},
    "list": [T1],
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(USES, USES)))
def test_two_uses_of_one_chunk(first, second):
    """Tensors of one chunk share its memory; a tensor and something else, or two of those, cannot have one chunk."""
    pair = {"d": {"x": USES[first], "y": USES[second]}}
    raws = sum(use in ("blob", "bytearray", "array") for use in (first, second))
    for root in (pair, [USES[first], USES[second]], {"map": [[0, USES[first]], [1, USES[second]]]}):
        saved = saved_with(root)
        loaded = outcome(lambda s=saved: load(s))
        with python_way():
            python = outcome(lambda s=saved: load(s))
        assert isinstance(loaded, str) == bool(raws) == isinstance(python, str), loaded
        if raws:
            assert loaded.startswith("CorruptStore")
    for x, y in itertools.product(("tensor", "none"), repeat=2):

        def target(x=x, y=y) -> dict:
            one, other = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
            return {"x": one if x == "tensor" else None, "y": other if y == "tensor" else None, "z": torch.zeros(())}

        saved = saved_with({"d": {**pair["d"], "z": {"t": {"chunk": 2, "shape": []}}}})
        native = outcome(lambda s=saved, t=target: done(bind(s, t())))
        with python_way():
            assert outcome(lambda s=saved, t=target: done(bind(s, t()))) == native
        assert not native.startswith("AssertionError"), "a chunk has one destination"
        if raws and x == y == "none":
            assert native.startswith("CorruptStore")


def test_a_bound_chunk_that_is_asked_for_again_is_still_filled():
    saved = saved_with({"d": {"x": T0, "y": T0, "z": {"d": {"w": T0}}, "n": [T0, T0]}})
    into = {"x": torch.zeros(2, 3), "y": torch.zeros(2, 3), "z": {"w": torch.zeros(2, 3)}, "n": None}
    bind(saved, into)
    for tensor in (into["x"], into["y"], into["z"]["w"], *into["n"]):
        assert bytes(tensor.view(torch.uint8).flatten().tolist()) == DATA[0]


COLUMN = st.one_of(st.integers(-3, 12), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, -(2**63), -(2**62)]))


@st.composite
def tables(draw):
    """A table of which some columns lie."""
    honest = table(INFOS)
    columns = {}
    for name in ("key_offsets", "key_lengths", "dims_at", "dims", "nbytes"):
        column = getattr(honest, name).copy()
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            column[draw(st.integers(0, len(column) - 1))] = draw(COLUMN)
        columns[name] = column
    for name in ("dtypes", "ndims"):
        column = getattr(honest, name).copy()
        for _ in range(draw(st.sampled_from([0, 0, 1]))):
            column[draw(st.integers(0, len(column) - 1))] = draw(st.integers(0, 255))
        columns[name] = column
    columns["dims"] = columns["dims"][: draw(st.sampled_from([99, 99, 5, 1, 0]))]
    keys = draw(st.sampled_from([honest.keys, honest.keys[:1], b"", b"\xff\xfe\xfd"]))
    return ChunkTable(keys=keys, **columns)


def read(plan) -> None:
    """What an engine would do: it reads whole chunks, as long as the table says."""
    for chunk, pointer in zip(plan.destinations.chunks.tolist(), plan.destinations.pointers.tolist(), strict=True):
        assert pointer
        assert plan.chunks.nbytes[chunk] > 0
    spots = plan.destinations.chunks.tolist()
    assert len(spots) == len(set(spots))
    if all(plan.chunks.nbytes[chunk] < 1 << 16 for chunk in spots):
        data = [bytes(max(0, min(int(count), 1 << 16))) for count in plan.chunks.nbytes]
        run(plan, Saved(b"", plan.chunks, data, ()))


@settings(max_examples=600, deadline=None)
@given(tables(), st.lists(st.integers(0, 8), max_size=4), st.integers(-1, 3))
def test_columns_that_lie(chunks, shape, number):
    nodes = [T0, T1, {"t": {"chunk": 2, "shape": []}}, {"t": {"chunk": number, "shape": shape}}]
    for root in (
        {"d": dict(zip("xyzw", nodes, strict=True))},
        nodes,
        {"map": [[i, node] for i, node in enumerate(nodes)]},
    ):
        saved = saved_with(root, chunks)
        with contextlib.suppress(*DAMAGED):
            read(plan_load(saved.document, chunks))
        with contextlib.suppress(*DAMAGED):
            read(plan_load(saved.document, chunks, keys=["*"]))
    saved = saved_with({"d": dict(zip("xyzw", nodes, strict=True))}, chunks)
    for live in (torch.zeros(shape), torch.zeros(2, 3)):
        for strict in (True, False):
            with contextlib.suppress(*DAMAGED):
                read(plan_bind(saved.document, chunks, {**targets(), "w": live}, strict=strict))


def test_columns_of_other_lengths_or_types():
    columns = [getattr(table(INFOS), name) for name in ("dtypes", "ndims", "dims_at", "dims", "nbytes")]
    _native.TensorTable(TORCH, torch.empty_like, *columns)
    for changed in range(5):
        if changed != 3:  # dims have a length of their own
            short = [column[:1] if number == changed else column for number, column in enumerate(columns)]
            with pytest.raises(Exception, match="differ in length"):
                _native.TensorTable(TORCH, torch.empty_like, *short)
    empty = _native.TensorTable(TORCH, torch.empty_like, *(column[:0] for column in columns))
    assert empty.whole(0, torch.empty) is None
    assert empty.get(2**63) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_no_document_or_one(text):
    with contextlib.suppress(CorruptStore):
        assert _native.parse_nodes(text) == json.loads(text)
