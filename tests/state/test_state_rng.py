from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from alike import assert_alike
from fake_engine import bind, load, round_trip, save
from models import TinyLM

from tierload.errors import CorruptStore, KeyMismatch, UnsupportedValue
from tierload.state import NO_CHUNKS, RNG, plan_load


def draw() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
    ]


def test_b84_all_process_generators_go_on_alike():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()
    saved = save({"rng": RNG()})
    want = draw()
    draw()
    report = bind(saved, {"rng": RNG()})
    assert draw() == want
    assert report.loaded == ("rng",)
    loaded = load(saved)["rng"]
    assert {"numpy", "python", "torch"} <= set(loaded)
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])
    assert draw() == want


def test_b84_training_with_dropout_and_shuffling_goes_on_alike():
    def make():
        model = torch.nn.Sequential(TinyLM(), torch.nn.Dropout(0.3))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def run(model, optimizer, order, steps):
        seen = []
        for _ in range(steps):
            tokens = torch.tensor(order.permutation(11)[:6]) * (1 if random.random() < 0.5 else 0)
            loss = model(tokens).square().mean() + float(np.random.rand())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((tokens.tolist(), loss.item()))
        return seen

    torch.manual_seed(0)
    model, optimizer = make()
    order = np.random.default_rng(5)
    run(model, optimizer, order, 3)
    saved = save({"model": model, "optimizer": optimizer, "rng": RNG(), "order": order})
    want = run(model, optimizer, order, 5)
    model, optimizer = make()
    order = np.random.default_rng(99)
    bind(saved, {"rng": RNG(), "model": model, "optimizer": optimizer, "order": order})
    assert run(model, optimizer, order, 5) == want


@pytest.mark.parametrize("bits", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_numpy_generators(bits):
    make = getattr(np.random, bits)
    generator, other = np.random.Generator(make(3)), np.random.Generator(make(4))
    generator.random(7)
    saved = save({"g": generator, "b": generator.bit_generator})
    want = generator.random(5).tolist()
    loaded = load(saved)
    assert loaded["g"].random(5).tolist() == want
    assert type(loaded["b"]) is make
    assert np.random.Generator(loaded["b"]).random(5).tolist() == want
    bind(saved, {"g": other, "b": make(1)})
    assert other.random(5).tolist() == want
    wrong = np.random.Generator(np.random.MT19937() if bits != "MT19937" else np.random.PCG64())
    with pytest.raises(KeyMismatch) as caught:
        bind(saved, {"g": wrong, "b": make(1)})
    assert caught.value.dtypes == ("g",)


def test_other_generators():
    state = {"py": random.Random(4), "np": np.random.RandomState(5), "t": torch.Generator().manual_seed(6)}
    state["np"].randn()
    saved = save(state)

    def sample(s):
        return [s["py"].random(), s["np"].randn(), torch.rand(2, generator=s["t"]).tolist()]

    live = {"py": random.Random(), "np": np.random.RandomState(), "t": torch.Generator()}
    objects = list(live.values())
    bind(saved, live)
    assert all(a is b for a, b in zip(objects, live.values(), strict=True))
    loaded = load(saved)
    want = sample(state)
    assert sample(loaded) == want
    assert sample(live) == want
    assert round_trip([state["py"]] * 2)[0] is not None
    pair = round_trip({"a": state["t"], "b": state["t"]})
    assert pair["a"] is pair["b"]


def test_states_as_values_round_trip():
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "dict": np.random.get_state(legacy=False),
        "generator": np.random.default_rng(1).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    loaded = round_trip(states)
    assert_alike(loaded, states)
    into = {"python": None, "numpy": np.random.get_state(), "dict": {}, "generator": {}, "torch": torch.get_rng_state()}
    bind(save(states), into)
    assert_alike(into, states)


def test_b66_no_payload_runs(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with pytest.raises(UnsupportedValue):
        save({"rng": Payload()})
    saved = save({"rng": Payload(), "model": torch.ones(2)}, allow_pickle=True)
    assert not (tmp_path / "ran").exists()
    for act in (lambda: load(saved), lambda: bind(saved, {"rng": None, "model": torch.zeros(2)})):
        with pytest.raises(UnsupportedValue, match="allow_pickle"):
            act()
    assert not (tmp_path / "ran").exists()
    data = pickle.dumps(Payload())
    assert round_trip({"bytes": data})["bytes"] == data
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "node",
    [
        '{"rng":{"kind":"numpy.Generator","state":{"d":{"bit_generator":"os"}}}}',
        '{"rng":{"kind":"numpy.Generator","state":{"d":{}}}}',
        '{"rng":{"kind":"python","state":{"tuple":[3,1]}}}',
        '{"rng":{"kind":"os.system","state":"ls"}}',
        '{"rng":{"kind":"torch.Generator","state":{"d":{"device":"cpu","state":3}}}}',
        '{"rng":{"kind":"torch.Generator","state":5}}',
        '{"rng":{"kind":"numpy.RandomState","state":{"d":{"bit_generator":"MT19937","state":1}}}}',
        '{"rng":{"kind":[],"state":1}}',
        '{"rng":5}',
    ],
)
def test_damaged_states_are_corrupt(node):
    with pytest.raises(CorruptStore):
        plan_load(f'{{"version":1,"root":{node}}}'.encode(), NO_CHUNKS).finish()


@pytest.mark.parametrize("bits", ["MT19937", "Philox"])
@pytest.mark.parametrize("position", [-1, 10**6, 2**62, 2.0])
def test_positions_outside_their_buffer_are_corrupt(bits, position):
    # numpy reads wherever such a position points.
    saved = save({"g": np.random.Generator(getattr(np.random, bits)(1)), "legacy": np.random.RandomState(1)})
    name = b'"pos":' if bits == "MT19937" else b'"buffer_pos":'
    head, _, tail = saved.document.partition(name)
    rest = tail.lstrip(b"0123456789")
    saved.document = head + name + str(position).encode() + rest
    with pytest.raises(CorruptStore):
        load(saved)
    live = {"g": np.random.Generator(getattr(np.random, bits)(1)), "legacy": np.random.RandomState(1)}
    with pytest.raises(CorruptStore):
        bind(saved, live)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the states of a machine with CUDA on one without")
def test_cuda_states_that_cannot_be_restored_are_told(monkeypatch):
    saved = save({"rng": RNG()})
    state = saved.document.replace(b'"torch":{"t"', b'"cuda":[1,2],"torch":{"t"')
    saved.document = state
    before = torch.get_rng_state()
    with pytest.raises(KeyMismatch, match="2 CUDA devices"):
        bind(saved, {"rng": RNG()})
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    report = bind(saved, {"rng": RNG()}, strict=False)
    assert report.dtypes == ("rng",)
    assert torch.equal(torch.get_rng_state(), before)
