from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import struct
import subprocess
import sys
import zoneinfo
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from alike import assert_alike
from fake_engine import load, round_trip, save
from hypothesis import given, settings

from tierload.errors import UnsupportedValue
from tierload.state import NO_CHUNKS, register_type


class Color(enum.Enum):
    RED = 1
    DEEP = (1, 2)


class Level(enum.IntEnum):
    LOW = 3


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: object
    y: object = 0


@dataclasses.dataclass
class Config:
    name: str
    inner: object = None
    sizes: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: tuple = ()


TYPES = [Color, Level, Flags, Point, Config, Frozen]
NAN_BITS = struct.unpack("<d", bytes.fromhex("0102030405f6f87f"))[0]


def test_b60_every_kind_of_value():
    state = {
        "ints": [0, -1, 2**63 - 1, -(2**63) + 1, -(2**63), 2**63, 10**400, -(10**5000)],
        "floats": [0.1, -0.0, 1e300, 5e-324, math.inf, -math.inf, math.nan, -math.nan, NAN_BITS, 1e16, 3.0],
        "bools": [True, False, None, 1, 0],
        "text": ["", "é", "\U0001f600", "\ud83d", "\ud83d\ude00", "\x00\x7f\u2028", '"\\'],
        "bytes": [b"", b"\x00\xff", bytes(range(256)) * 100, bytearray(b"ab"), bytearray(9000)],
        "complex": [1j, complex(math.nan, -0.0), complex(-math.inf, 2)],
        "tuples": [(), (1,), ((), [()])],
        "named": Point(1, Point("a", torch.ones(2))),
        "sets": [set(), {1, 2, "a"}, frozenset({frozenset({1}), (1, "x"), None, b"q"})],
        "dicts": [{}, {"a": {}}, {1: 2, "1": 3, None: 4, (1, (2,)): 5, 1.5: 6}],
        "ordered": collections.OrderedDict([("z", 1), ("a", [])]),
        "ddict": collections.defaultdict(list, {"a": [1]}),
        "none": collections.defaultdict(None, {1: 2}),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, [2]], maxlen=5),
        "data": Config("n", Config("m", {"t": torch.zeros(1)}), [1, 2]),
        "frozen": Frozen(1, (2, 3)),
        "enums": [Color.RED, Color.DEEP, Level.LOW, Flags.A | Flags.B, Flags(0)],
        "torch": [torch.Size([1, 2]), torch.Size([]), torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")],
        "layouts": [torch.strided, torch.sparse_coo],
        "numpy": [
            np.float32(1.5),
            np.int8(-3),
            np.bool_(True),
            np.str_("é"),
            np.bytes_(b"x"),
            np.datetime64("2020-01-01"),
            np.timedelta64(5, "ns"),
            np.str_(""),
            np.str_("a\0\0"),
            np.bytes_(b"a\0"),
            np.bytes_(b""),
            np.float64("nan"),
        ],
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "arrays": [
            np.arange(6).reshape(2, 3),
            np.zeros((0, 3), np.float16),
            np.array(3.5),
            np.asfortranarray(np.ones((2, 3))),
            np.arange(6).reshape(2, 3)[:, ::2],
            np.arange(3, dtype=">i4"),
            np.array(["a", "é"]),
        ],
        "times": [datetime.date(2020, 2, 29), datetime.time(1, 2, 3, 4), datetime.timedelta(-1, 5, 7)],
        "stamps": [
            datetime.datetime(2020, 1, 1, 12, 30, 1, 5),
            datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, minutes=7))),
            datetime.datetime(2020, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
            datetime.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        ],
        "paths": [pathlib.Path("/a/b"), pathlib.Path("."), pathlib.Path("x\udcff")],
        "ranges": [range(3), range(5, -5, -2), slice(1, None), slice(None, 2**70, -1)],
    }
    loaded = load(save(state), types=TYPES)
    assert_alike(loaded, state)
    assert loaded["stamps"][3].utcoffset() == state["stamps"][3].utcoffset()
    assert loaded["stamps"][3].tzinfo.key == "Europe/Berlin"


def test_types_are_only_rebuilt_when_they_are_passed():
    state = {"p": Point(1, [2]), "c": Config("n", 2), "e": Color.RED, "f": frozenset({Color.RED, Frozen(1)})}
    saved = save(state)
    from tierload.state import plan_load

    loaded = load(saved)
    assert loaded == {
        "p": (1, [2]),
        "c": {"name": "n", "inner": 2, "sizes": []},
        "e": 1,
        "f": frozenset({1, (1, ())}),
    }
    assert plan_load(saved.document, saved.chunks, types=TYPES).finish() == state

    @register_type
    @dataclasses.dataclass
    class Mine:
        x: int

    loaded = round_trip([Mine(3)])
    assert type(loaded[0]) is Mine
    assert loaded[0].x == 3
    with pytest.raises(TypeError, match="int"):
        register_type(int)


def test_changed_types_fall_back_to_plain_values():
    saved = save({"c": Config("n", 2), "e": Color.DEEP, "p": Point(1, 2)})

    def renamed(cls, name):
        cls.__module__, cls.__qualname__ = __name__, name
        return cls

    wider = renamed(dataclasses.make_dataclass("Config", ["name", "inner", "sizes", ("more", int, 5)]), "Config")
    other = renamed(dataclasses.make_dataclass("Config", ["name", "else_"]), "Config")
    colors = renamed(enum.Enum("Color", {"BLUE": 5}), "Color")
    points = renamed(collections.namedtuple("Point", "x z"), "Point")
    assert load(saved, types=[wider])["c"].more == 5
    plain = load(saved, types=[other, colors, points])
    assert plain == {"c": {"name": "n", "inner": 2, "sizes": []}, "e": (1, 2), "p": (1, 2)}


def test_shared_containers_and_cycles():
    shared = [1, {"k": 2}]
    state = {"a": shared, "b": shared, "d": shared[1], "q": collections.deque([shared])}
    state["self"] = state
    data = Config("n")
    data.inner = [data]
    state["data"] = data
    array = np.arange(3)
    state["arrays"] = [array, array]
    buffer = bytearray(b"x" * 5000)
    state["buffers"] = (buffer, buffer)
    loaded = load(save(state), types=TYPES)
    assert loaded["a"] is loaded["b"]
    assert loaded["d"] is loaded["a"][1]
    assert loaded["q"][0] is loaded["a"]
    assert loaded["self"] is loaded
    assert loaded["data"].inner[0] is loaded["data"]
    assert loaded["arrays"][0] is loaded["arrays"][1]
    assert loaded["buffers"][0] is loaded["buffers"][1]
    assert loaded["buffers"][0] == buffer
    ring = []
    ring.append((ring,))
    loaded = round_trip(ring)
    assert loaded[0][0] is loaded


def test_equal_immutable_values_do_not_depend_on_identity():
    one = (1, 2)
    assert save({"a": one, "b": one}).document == save({"a": (1, 2), "b": tuple(json.loads("[1, 2]"))}).document


@pytest.mark.parametrize("depth", [100, 499])
def test_deep_states(depth):
    for wrap in (lambda v: [v], lambda v: {"a": v}, lambda v: (v,), lambda v: Config("n", v), lambda v: {1: v}):
        state = torch.ones(1)
        for _ in range(depth):
            state = wrap(state)
        loaded = load(save(state), types=TYPES)
        for _ in range(depth):
            state = (
                state.inner if isinstance(state, Config) else next(iter(getattr(state, "values", lambda s=state: s)()))
            )
            loaded = (
                loaded.inner
                if isinstance(loaded, Config)
                else next(iter(getattr(loaded, "values", lambda s=loaded: s)()))
            )
        assert torch.equal(loaded, state)


def test_states_that_are_too_deep():
    state = []
    for _ in range(5000):
        state = [state]
    with pytest.raises(UnsupportedValue, match="deeper than 500 levels"):
        save({"x": state})
    key = ()
    for _ in range(60):
        key = (key,)
    with pytest.raises(UnsupportedValue, match="deeper than 50 levels"):
        save({key: 1})


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 1,
        print,
        int,
        np.array([object()]),
        np.zeros(2, dtype=[("a", int)]),
        np.ma.masked_array([1]),
        collections.defaultdict(lambda: 1),
        type("Sub", (dict,), {})(),
        type("Text", (str,), {})("x"),
        datetime.datetime(2020, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {"utcoffset": lambda s, d: None})()),
        iter([]),
        {(1, object())},
        torch.Stream if hasattr(torch, "Stream") else object,
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_refused_by_name(value):
    with pytest.raises(UnsupportedValue) as caught:
        save({"cfg": {"a/b": [1, value]}})
    assert "state['cfg']['a/b'][1]" in str(caught.value)
    assert "cfg/a~1b/#1" in str(caught.value)


class Pickled:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


def test_pickle_needs_both_sides():
    state = {"x": Pickled(3), "t": torch.ones(2)}
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        save(state)
    saved = save(state, allow_pickle=True)
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        load(saved)
    assert load(saved, allow_pickle=True)["x"] == Pickled(3)
    assert load(saved, keys=["t"])["t"].tolist() == [1, 1]
    with pytest.raises(UnsupportedValue, match="pickled either"):
        save({"x": lambda: 1}, allow_pickle=True)


SCALAR = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=20)
    | st.text(st.sampled_from(["\ud83d", "\ude00", "a"]), max_size=4)
    | st.binary(max_size=20)
    | st.datetimes()
    | st.timedeltas()
    | st.sampled_from(
        [Color.RED, Level.LOW, torch.float32, torch.Size([2]), range(3), np.float32(2), pathlib.Path("a")]
    )
)
HASHABLE = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.text(max_size=3))
)
STATE = st.recursive(
    SCALAR | st.integers(0, 5).map(lambda n: torch.arange(n)) | st.binary(max_size=9).map(bytearray),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.sets(HASHABLE, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Config, st.text(max_size=3), inner),
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(STATE)
def test_any_state_round_trips(state):
    saved = save(state)
    assert_alike(load(saved, types=TYPES), state)
    assert save(state).document == saved.document


def test_documents_do_not_depend_on_the_hash_seed():
    program = (
        "import torch\nfrom tierload.state import flatten\n"
        "s = {'s': {'a', 'b', 'c', 1, None, (1, 'x'), frozenset('abcdef')}, 'f': frozenset('xyzw')}\n"
        "print(flatten(s).document.decode())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


def test_nothing_named_by_the_store_is_imported(tmp_path, monkeypatch):
    module = tmp_path / "evil_module.py"
    module.write_text("import pathlib; pathlib.Path('ran').touch()\nclass C: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    document = (
        b'{"version":1,"root":{"tuple":[{"data":{"type":"evil_module:C","fields":[["a",1]]}},'
        b'{"enum":{"type":"evil_module:C","name":"A","value":1}},{"object":{"type":"evil_module:C","state":{"d":{}}}},'
        b'{"named":{"type":"evil_module:C","fields":[["a",1]]}}]}}'
    )
    from tierload.state import plan_load

    assert plan_load(document, NO_CHUNKS).finish() == ({"a": 1}, 1, {}, (1,))
    assert not (tmp_path / "ran").exists()
    assert "evil_module" not in sys.modules
