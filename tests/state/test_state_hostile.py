from __future__ import annotations

import collections
import contextlib
import datetime
import json

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from fake_engine import load, run, save, table
from hypothesis import HealthCheck, given, settings
from torch import nn

from tierload.errors import CorruptStore, KeyMismatch, UnsupportedFormat, UnsupportedValue
from tierload.state import NO_CHUNKS, plan_bind, plan_load
from tierload.state.texts import parse
from tierload.types import ChunkInfo

FLOATS = ChunkInfo(0, "t", 12, (2, 3), (0, 0), (2, 3), 24)
BYTES = ChunkInfo(1, "b", 2, (8,), (0,), (8,), 8)
BOTH = table([FLOATS, BYTES])


def document(root: str) -> bytes:
    return f'{{"version":1,"root":{root}}}'.encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"5",
        b'{"version":1}',
        b'{"root":1}',
        b'{"version":"1","root":1}',
        b'{"version":1,"root":1} x',
        b'{"version":1,"version":1,"root":1}',
        b'{"version":1,"root":NaN}',
        b'{"version":1,"root":[1,]}',
        b'{"version":1,"root":' + b"[" * 10**6,
        b'{"version":1,"root":' + b'{"d":{"a":' * 3000 + b"1" + b"}}" * 3000 + b"}",
        b'{"version":1,"root":' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"version":1,"root":' + b"9" * 5000 + b"}",
    ],
)
def test_damaged_documents(text):
    with pytest.raises(CorruptStore):
        plan_load(text, NO_CHUNKS)


def test_newer_documents():
    with pytest.raises(UnsupportedFormat, match="version 2"):
        plan_load(b'{"version":2,"root":1}', NO_CHUNKS)


@pytest.mark.parametrize(
    "root",
    [
        "{}",
        '{"a":1,"b":2}',
        '{"what":1}',
        '{"d":[]}',
        '{"d":5}',
        '{"d":{"a":1,"a":2}}',
        '{"map":[[1,2],[1,3],[1,4]]}',
        '{"map":[[[1],2]]}',
        '{"map":[[{"d":{}},2]]}',
        '{"map":[1]}',
        '{"map":5}',
        '{"tuple":5}',
        '{"set":[[1]]}',
        '{"set":5}',
        '{"set":[{"t":{"chunk":0,"shape":[2,3]}}]}',
        '{"int":5}',
        '{"int":"x"}',
        '{"float":"1.0"}',
        '{"float":"nan:zz"}',
        '{"float":"nan:00000000000000zz"}',
        '{"float":null}',
        '{"complex":[1]}',
        '{"complex":["1","2"]}',
        '{"bytes":"!"}',
        '{"bytes":5}',
        '{"bytes":"\\u00e9"}',
        '{"bytes":"YQ"}',
        '{"bytearray":"YQ"}',
        '{"text":"/w=="}',
        '{"size":["a"]}',
        '{"size":[true]}',
        '{"dtype":"load"}',
        '{"dtype":"__name__"}',
        '{"layout":"float32"}',
        '{"device":"nowhere"}',
        '{"device":"cpu:' + "1" * 50 + '"}',
        '{"path":5}',
        '{"path":null}',
        '{"date":"x"}',
        '{"datetime":"2020-01-01[../../etc/passwd]"}',
        '{"datetime":"2020-01-01[No/Where]"}',
        '{"time":"25:00"}',
        '{"timedelta":[1]}',
        '{"timedelta":[1e400,1,1]}',
        '{"timedelta":[99999999999999999999,1,1]}',
        '{"range":[1,2]}',
        '{"range":[1,2,0]}',
        '{"range":["a",2,1]}',
        '{"slice":[1]}',
        '{"deque":{"items":[],"maxlen":-1}}',
        '{"deque":{"items":5,"maxlen":null}}',
        '{"deque":[]}',
        '{"ddict":{"items":[],"factory":"eval"}}',
        '{"ddict":{"items":[]}}',
        '{"counter":{}}',
        '{"statedict":{"items":[]}}',
        '{"named":{"type":"a:B"}}',
        '{"named":{"type":5,"fields":[]}}',
        '{"named":{"type":"a:B","fields":[["a",1],["a",2]]}}',
        '{"data":{"type":"a:B","fields":[[1,1]]}}',
        '{"enum":{"type":"a:B","name":"x"}}',
        '{"object":{"type":"a:B"}}',
        '{"object":5}',
        '{"object":{"type":"a","optimizer":5}}',
        '{"object":{"type":"a","optimizer":{"names":[1],"groups":[],"state":[],"rest":{"d":{}}}}}',
        '{"object":{"type":"a","optimizer":{"names":[],"groups":[],"state":[1],"rest":{"d":{}}}}}',
        '{"npscalar":{"dtype":"<f4","data":""}}',
        '{"npscalar":{"dtype":"O","data":"AAAAAAAAAAA="}}',
        '{"npscalar":{"dtype":"<f3","data":"AAAA"}}',
        '{"npscalar":{"dtype":"|V8","data":"AAAAAAAAAAA="}}',
        '{"npscalar":5}',
        '{"pickle":5}',
        '{"file":{"chunk":1,"mode":420}}',
        '{"ref":0}',
        '[{"ref":5}]',
        '[{"ref":-1}]',
        '[{"ref":"0"}]',
        '[{"ref":true}]',
        '{"object":{"type":"a","state":{"ref":0}}}',
        '{"set":[{"ref":0}]}',
    ],
)
def test_damaged_values(root):
    with pytest.raises((CorruptStore, UnsupportedValue)) as caught:
        plan_load(document(root), BOTH).finish()
    assert root == '{"pickle":5}' or caught.type is CorruptStore
    with pytest.raises((CorruptStore, KeyMismatch, UnsupportedValue)):
        plan_bind(document(root), BOTH, {"x": torch.ones(1)})
    with pytest.raises((CorruptStore, KeyMismatch, UnsupportedValue)):
        plan_bind(document(f'{{"d":{{"x":{root}}}}}'), BOTH, {"x": None, "y": 1})


@pytest.mark.parametrize(
    "tensor",
    [
        "5",
        "{}",
        '{"chunk":0}',
        '{"shape":[2,3]}',
        '{"chunk":2,"shape":[2,3]}',
        '{"chunk":-1,"shape":[2,3]}',
        '{"chunk":"0","shape":[2,3]}',
        '{"chunk":true,"shape":[8]}',
        '{"chunk":0.0,"shape":[2,3]}',
        '{"chunk":[],"shape":[2,3]}',
        '{"chunk":0,"shape":[2,4]}',
        '{"chunk":0,"shape":[-2,-3]}',
        '{"chunk":0,"shape":"x"}',
        '{"chunk":0,"shape":null}',
        '{"chunk":0,"shape":[2,3],"more":1}',
        '{"chunk":0,"shape":[3],"stride":[3],"offset":0}',
        '{"chunk":0,"shape":[1],"stride":[1],"offset":6}',
        '{"chunk":0,"shape":[1],"stride":[1],"offset":-1}',
        '{"chunk":0,"shape":[2],"stride":[-1],"offset":3}',
        '{"chunk":0,"shape":[2],"stride":[1]}',
        '{"chunk":0,"shape":[2],"offset":1}',
        '{"chunk":0,"shape":[2],"stride":[1,1],"offset":0}',
        '{"chunk":0,"shape":[2],"stride":[9223372036854775807],"offset":0}',
        '{"chunk":0,"shape":[2],"stride":[18446744073709551616],"offset":0}',
        '{"chunk":0,"shape":[4611686018427387904,4],"stride":[0,0],"offset":0}',
        '{"chunk":0,"shape":[' + "1," * 300 + '1],"stride":[' + "1," * 300 + '1],"offset":0}',
        '{"chunk":0,"shape":[6],"dtype":"float64"}',
        '{"chunk":0,"shape":[4],"stride":[1],"offset":0,"dtype":"float64"}',
        '{"chunk":0,"shape":[3],"stride":[1],"offset":0,"dtype":"float128"}',
        '{"chunk":0,"shape":[3],"stride":[1],"offset":0,"dtype":[]}',
        '{"chunk":0,"shape":[2,3],"conj":true}',
        '{"chunk":0,"shape":[2,3],"conj":1}',
        '{"chunk":0,"shape":[2,3],"kind":"module"}',
        '{"chunk":1,"shape":[8],"grad":true}',
    ],
)
def test_tensors_that_leave_their_chunk(tensor):
    with pytest.raises(CorruptStore):
        plan_load(document(f'{{"t":{tensor}}}'), BOTH)
    for live in (torch.zeros(2, 3), torch.zeros(8, dtype=torch.uint8), torch.zeros(3)):
        with pytest.raises((CorruptStore, KeyMismatch)):
            plan_bind(document(f'{{"d":{{"x":{{"t":{tensor}}}}}}}'), BOTH, {"x": live, "y": live})


@pytest.mark.parametrize(
    "chunk",
    [
        ChunkInfo(0, "t", 99, (2, 3), (0, 0), (2, 3), 24),
        ChunkInfo(0, "t", 12, (2, 3), (0, 0), (2, 3), 23),
        ChunkInfo(0, "t", 12, (-2, -3), (0, 0), (-2, -3), 24),
        ChunkInfo(0, "t", 12, (4, 3), (0, 0), (2, 3), 24),
        ChunkInfo(0, "t", 12, (2, 3), (1, 0), (2, 3), 24),
    ],
)
def test_chunks_that_contradict_themselves(chunk):
    with pytest.raises(CorruptStore):
        plan_load(document('{"t":{"chunk":0,"shape":[2,3]}}'), table([chunk]))


def test_a_chunk_has_one_kind_of_use():
    blob = '{"blob":{"chunk":1,"as":"bytes"}}'
    tensor = '{"t":{"chunk":1,"shape":[8]}}'
    array = '{"ndarray":{"chunk":1,"dtype":"<f4","shape":[2],"order":"C"}}'
    for pair in ([blob, tensor], [tensor, blob], [array, blob], [blob, blob]):
        with pytest.raises(CorruptStore):
            plan_load(document("[" + ",".join(pair) + "]"), BOTH)
    for bad in (
        '{"blob":{"chunk":0,"as":"bytes"}}',
        '{"blob":{"chunk":1,"as":"str"}}',
        '{"ndarray":{"chunk":1,"dtype":"<f4","shape":[3],"order":"C"}}',
        '{"ndarray":{"chunk":1,"dtype":"O","shape":[1],"order":"C"}}',
        '{"ndarray":{"chunk":1,"dtype":"<f4","shape":[-2],"order":"C"}}',
        '{"ndarray":{"chunk":1,"dtype":"<f4","shape":[2],"order":"X"}}',
        '{"ndarray":{"chunk":1,"dtype":"<f4","shape":[2]}}',
    ):
        with pytest.raises(CorruptStore):
            plan_load(document(bad), BOTH)


def test_views_that_are_legal_but_strange():
    plan = plan_load(
        document('{"t":{"chunk":0,"shape":[1,6],"stride":[9223372036854775807,1],"offset":0}}'), table([FLOATS])
    )
    assert plan.finish().shape == (1, 6)
    plan = plan_load(document('{"t":{"chunk":0,"shape":[0,5],"stride":[5,1],"offset":99}}'), table([FLOATS]))
    assert plan.finish().shape == (0, 5)
    plan = plan_load(document('{"t":{"chunk":0,"shape":[1099511627776],"stride":[0],"offset":5}}'), table([FLOATS]))
    assert plan.finish().shape == (1 << 40,)


def test_a_chunk_that_is_too_large_for_memory():
    huge = ChunkInfo(0, "t", 12, (1 << 58,), (0,), (1 << 58,), 1 << 60)
    with pytest.raises(MemoryError, match="key 't'"):
        plan_load(document('{"t":{"chunk":0,"shape":[288230376151711744]}}'), table([huge]))


def sample() -> dict:
    layer = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    base = torch.arange(6.0)
    shared = [1, 2]
    return {
        "m": layer,
        "o": optimizer,
        "v": [base, base[2:4], base.view(2, 3).t()],
        "n": np.arange(3),
        "x": (1.5, {"a", "b"}, b"abc", bytes(5000), shared, shared, None, 2**70, 1j),
        1: datetime.date(2020, 1, 1),
        "od": collections.OrderedDict(a=1),
        "g": torch.Generator(),
    }


SAVED = save(sample())
DAMAGED = (CorruptStore, UnsupportedValue, UnsupportedFormat, KeyMismatch, MemoryError)


def _mutated(data: st.DataObject) -> bytes:
    """The sample's document with one node replaced by something else of JSON."""
    tree = json.loads(SAVED.document)
    spots: list[tuple[object, object]] = []
    stack: list[object] = [tree]
    while stack:
        node = stack.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            spots.append((node, key))
            stack.append(value)
    holder, key = spots[data.draw(st.integers(0, len(spots) - 1))]
    what = data.draw(st.sampled_from(["value", "other", "drop", "rename"]))
    if what == "other":
        source, name = spots[data.draw(st.integers(0, len(spots) - 1))]
        holder[key] = json.loads(json.dumps(source[name]))
    elif what == "drop":
        del holder[key]
    elif what == "rename" and isinstance(holder, dict):
        holder[data.draw(st.sampled_from(["d", "t", "map", "ref", "chunk", "ndarray", "x"]))] = holder.pop(key)
    else:
        holder[key] = data.draw(
            st.sampled_from(
                [None, True, -1, 0, 1, 2**63, 1.5, "", "a", [], {}, [[]], {"ref": 0}, {"ref": 3}, {"d": {}}]
            )
        )
    return json.dumps(tree).encode()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_one_change_is_harmless(data):
    changed = _mutated(data)
    with contextlib.suppress(*DAMAGED):
        run(plan_load(changed, SAVED.chunks, allow_pickle=False), SAVED)
    with contextlib.suppress(*DAMAGED):
        run(plan_bind(changed, SAVED.chunks, sample()), SAVED)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(SAVED.document) - 1), st.integers(0, 255))
def test_any_changed_byte_is_harmless(position, value):
    text = bytearray(SAVED.document)
    text[position] = value
    with contextlib.suppress(*DAMAGED):
        run(plan_load(bytes(text), SAVED.chunks), SAVED)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(JSON, st.booleans())
def test_the_parser_agrees_with_pythons(value, spread):
    text = json.dumps(value, indent=1 if spread else None)
    assert parse(text.encode()) == json.loads(text) == value
    wrapped = "[" * 1200 + text + "]" * 1200
    got = parse(wrapped.encode())
    for _ in range(1200):
        (got,) = got
    assert got == value


@pytest.mark.parametrize(
    "text", r'"\ud800" "\udc00x" "\ud83d\ude00" "\ud800\u0041" "\"\\\/\b\f\n\r\t\u0000" -0.0'.split()
)
def test_the_parser_reads_every_escape(text):
    assert repr(parse(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        *r"""[ [1 [1, [1,] { {"a" {"a": {"a":1,} {1:2} tru nul "a ] [} [1} {"a":1] 01 1. .5 1e +1 --1 1e999""".split(),
        *r'"\x" "\u12" "\u12g4" 9223372036854775808'.split(),
        *("", "[1 2]", "1 1", '"\n"'),
    ],
)
def test_the_parser_refuses_what_is_no_json(text):
    with pytest.raises(CorruptStore, match="cannot be read"):
        parse(text.encode())


def test_nothing_is_changed_by_a_damaged_document():
    state = sample()
    weights = state["m"].weight.detach().clone()
    text = SAVED.document.replace(b'"momentum_buffer":{"t":{"chunk":', b'"momentum_buffer":{"t":{"chunk":9')
    with pytest.raises(CorruptStore):
        plan_bind(text, SAVED.chunks, state)
    assert torch.equal(state["m"].weight, weights)
    assert load(SAVED)["n"].tolist() == [0, 1, 2]
