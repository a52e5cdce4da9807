"""The rescue reader, written from docs/FORMAT.md alone, against stores that the engine writes, key for key and byte for
byte. What the two make of damaged stores is in test_second_opinion_on_damage.py."""

from __future__ import annotations

import tempfile
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierload
from tests.rescue import states
from tests.rescue.builder import Builder, array, tensor
from tests.rescue.keeper import Keeper
from tests.rescue.opinion import check_layout, check_store
from tests.rescue.support import BIAS, STEPS, WEIGHT, file_of, simple
from tierload import Settings, rescue
from tierload.rescue.__main__ import main
from tierload.rescue.files import read_at
from tierload.rescue.manifest import PAGES, Manifest
from tierload.rescue.pages import CONST, LZ4, RAW, ZSTD

SETTINGS = {
    "as they are": Settings(compression="fast"),
    "small pages": Settings(compression="fast", page_bytes=4096, pack_below_bytes=1024, threads=2),
    "off": Settings(compression="off", page_bytes=65536),
    "small": Settings(compression="small", page_bytes=262144, max_segment_size_mb=1),
    "large pages": Settings(compression="fast", page_bytes=16 << 20, pack_below_bytes=1 << 20),
}


Values = st.SearchStrategy[Any]
KEYS: Values = st.text(max_size=3) | st.integers() | st.none() | st.booleans() | st.binary(max_size=2)
KEYS = st.one_of(KEYS, st.floats(allow_nan=False), st.complex_numbers(allow_nan=False))
KEYS = st.one_of(KEYS, st.tuples(KEYS), st.tuples(KEYS, KEYS), st.frozensets(st.integers(), max_size=2))


@st.composite
def views(draw: st.DrawFn, bases: list[torch.Tensor]) -> torch.Tensor:
    """A view of one of some tensors, so that several share memory."""
    tensor = draw(st.sampled_from(bases))
    for change in draw(st.lists(st.sampled_from(["flip", "slice", "wide", "conj", "bits"]), max_size=3)):
        if change == "flip" and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1)
        elif change == "slice" and tensor.dim():
            first, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
            tensor = tensor[first::step]
        elif change == "wide" and tensor.dim() < 4:
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        elif change == "conj" and tensor.is_complex():
            tensor = tensor.conj()
        elif change == "bits" and tensor.dtype is torch.float32:
            tensor = tensor.view(torch.int32)
    return tensor


@st.composite
def random_states(draw: st.DrawFn) -> Any:
    """Containers of tensors, arrays and small values under keys of every type."""
    shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    dtypes = st.sampled_from(
        [dtype for dtype in states.DTYPES if dtype is not torch.float4_e2m1fn_x2 and dtype not in states.SHELLS]
    )  # they have no repr
    made = st.builds(states.filled, dtypes, shapes, st.integers(0, 3))
    bases = [*draw(st.lists(made, min_size=1, max_size=4)), states.filled(torch.float32, (40, 70))]
    small: Values = st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
    blobs = st.integers(0, 9000).map(lambda count: states.random_bytes(count, 1).tobytes())
    arrays = views(bases).filter(lambda tensor: tensor.dtype is torch.float32).map(lambda tensor: tensor.numpy())
    leaves: Values = st.one_of(views(bases), arrays, blobs, small)

    def holders(inner: Values) -> Values:
        several = st.lists(inner, max_size=4)
        return several | several.map(tuple) | several.map(deque) | st.dictionaries(KEYS, inner, max_size=4)

    return draw(st.recursive(leaves, holders, max_leaves=12))


@given(
    several=st.lists(random_states(), min_size=1, max_size=3),
    page_bytes=st.sampled_from([4096, 8192, 1 << 20]),
    pack_below_bytes=st.sampled_from([0, 100, 4096]),
    compression=st.sampled_from(["off", "fast", "small"]),
    full_every=st.integers(0, 2),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_state(several: list[Any], **more: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(Path(folder) / "store", Settings(threads=1, **more))
        for state in several:
            keeper.save(state)
        keeper.check()
        keeper.store.close()


@pytest.fixture(params=SETTINGS)
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path / "store", SETTINGS[request.param])
    yield keeper
    keeper.store.close()


def test_every_dtype(keeper: Keeper) -> None:
    keeper.save(states.every_dtype(2000))
    keeper.save(states.every_dtype(40_000))
    keeper.check()


def test_real_looking_data(keeper: Keeper) -> None:
    commit = keeper.save(states.real_looking(300)).commit
    keeper.check()
    (found,) = [found for found in rescue.commits(keeper.path) if found.id == commit.id]
    manifest = Manifest(keeper.path, found.row, rescue.Report())
    kinds = set[int]()
    for number in range(manifest.count(PAGES)):
        *_, at, segment, _, _, codec, item = manifest.row(PAGES, number)
        if codec:
            kinds |= set(read_at(keeper.path / manifest.segment(segment)[0], at, 4 + 8 * item)[4::8])
    compression = keeper.settings.compression
    assert kinds - {LZ4} == (set() if compression == "off" else {RAW, CONST, ZSTD})
    assert (LZ4 in kinds) == (compression == "fast")


def test_shared_memory(keeper: Keeper) -> None:
    torch.manual_seed(1)
    keeper.save(states.shared_memory())
    keeper.save([*states.shared_memory().values()])
    keeper.check()


def test_each_view_by_itself_and_beside_its_base(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "store")
    state = states.shared_memory()
    for key in sorted(state):
        keeper.save({key: state[key]})
        keeper.save({key: state[key], "base": state["z"]})
    keeper.check()
    keeper.store.close()


def test_typed_values(keeper: Keeper, tmp_path: Path) -> None:
    keeper.save(states.typed_values(tmp_path / "folder"))
    keeper.save(torch.arange(5))
    keeper.save([torch.ones(1)])
    keeper.save({})
    keeper.save(b"bytes" * 1000)
    keeper.check()
    out = tmp_path / "out.safetensors"
    assert main([str(keeper.path), "--commit", "1", "--to", str(out)]) == 0
    first = next(iter(keeper.expected.values()))
    assert sorted(bytes(held["data"]) for held in file_of(out).values()) == sorted(
        data for _, _, data in first.values()
    )


def test_a_deep_state_and_one_with_many_keys(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "store")
    deep: Any = torch.ones(3)
    for _ in range(499):
        deep = OrderedDict(a=deep)
        deep._metadata = {}
    keeper.save(deep)
    check_store(keeper.path, keeper.expected)
    keeper.store.close()
    keeper = Keeper(tmp_path / "other")
    layers = {f"layer {number}": torch.full((5,), number) for number in range(3000)}
    keeper.save(layers)
    keeper.save(layers | {"layer 7": torch.zeros(5)})
    assert max(path.stat().st_size for path in (keeper.path / "man").iterdir()) > 256 << 10  # several leaves
    keeper.check()
    keeper.store.close()


def test_a_training_run(keeper: Keeper) -> None:
    training = states.Training()
    keeper.save(training.state())
    for step in range(3):
        training.step()
        keeper.save(training.state(), step=step, metrics={"loss": 0.5, "name": "ä"}, note="n\udc80" * step)
    keeper.check()


def test_a_history(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "store", Settings(page_bytes=4096, pack_below_bytes=2048, full_every=4))
    weights, frozen = torch.randn(100, 100), torch.randn(64, 64)
    keeper.check()  # no commit yet

    def save(step: int, **more: Any) -> tierload.SaveReport:
        weights[step % 100] += 1
        state = {"w": weights, "f": frozen, "s": step, "t": weights[:3].clone(), "copy": frozen.clone()}
        return keeper.save(state, step=step, **more)

    first = save(0, tags=["first", "ä\udc80"], metrics={"loss": 1.5})
    second = save(1)
    assert second.written_pages < first.written_pages
    keeper.store.record("lr", 0.1, step=1)
    keeper.store.record("unsynced", "x", sync=False)
    save(2, note="third")
    keeper.store.record("lr", 0.2)
    keeper.store.record("ö/\udc80", [1, 2.5, None, "text"])
    keeper.check()
    assert save(3).written_bytes > second.written_bytes  # the fourth is written afresh
    save(4)
    keeper.roll_back(1)
    keeper.check()
    assert keeper.store.recorded() == {}
    keeper.store.tag("first", remove=True)
    keeper.store.tag("kept", 1)
    save(5)
    save(2)
    keeper.store.close()
    keeper.open()
    keeper.check()
    back = keeper.roll_back("kept")
    save(6, tags=["kept"])
    keeper.check()
    assert keeper.store.collect(keep=3).dropped
    left = {commit.id for commit in keeper.store.commits()}
    assert back.id in left
    keeper.expected = {name: tensors for name, tensors in keeper.expected.items() if name in left}
    keeper.check()
    keeper.store.close()
    keeper.open()
    for step in range(7, 12):
        save(step)
    keeper.store.collect(keep=1)
    left = {commit.id for commit in keeper.store.commits()}
    keeper.expected = {name: tensors for name, tensors in keeper.expected.items() if name in left}
    keeper.check()
    keeper.store.close()


def test_a_store_that_was_opened_and_left(tmp_path: Path) -> None:
    for _ in range(3):
        tierload.open(tmp_path / "store", mode="w").close()
    assert rescue.commits(tmp_path / "store") == []


def test_the_same_calls_write_the_same_bytes(tmp_path: Path) -> None:
    trees = []
    for name in "ab":
        torch.manual_seed(3)
        keeper = Keeper(tmp_path / name, Settings(compression="fast", threads=3 if name == "a" else 1))
        keeper.save(states.shared_memory())
        keeper.save(states.real_looking(40), step=1)
        keeper.store.close()
        files = [*(keeper.path / "seg").iterdir(), *(keeper.path / "man").iterdir()]
        trees.append({file.name: file.read_bytes() for file in files})
    assert trees[0] == trees[1]


def test_the_engine_reads_what_was_written_by_hand(tmp_path: Path) -> None:
    builder = Builder(tmp_path, epoch=3)
    simple(builder, 1, step=10, meta={"metrics": {"d": {"loss": 2.5}}})
    chunks = {
        "l/#0": array(WEIGHT, kinds=[RAW, ZSTD, LZ4, ZSTD], rotate=True),
        "l/#1": array(STEPS, kinds=[LZ4, LZ4, CONST, CONST, CONST, CONST, CONST, CONST]),
        "p": array(BIAS, pack="x"),
        "q": array(BIAS[:7], pack="x"),
    }
    turned = tensor("l/#0", [200, 300], stride=[1, 200], offset=0)
    root = {"l": [tensor("l/#0", [300, 200]), tensor("l/#1", [20000]), turned], "p": tensor("p", [50])}
    document = '{"version":1,"root":{"d":{"value":%d,"step":null}}}'
    builder.commit(chunks, {"d": root | {"q": tensor("q", [7])}}, changes={"k": (document % 1).encode()})
    builder.tag("t", 1)
    builder.roll()
    builder.record(3, builder.change("k", (document % 2).encode()))
    builder.roll(epoch=4)
    builder.super(3, (4, 0))
    check_layout(tmp_path)
    with tierload.Store(tmp_path) as store:
        assert (store.warnings, store.damage, store.recorded()) == ((), "", {"k": 2})
        assert [(c.txid, c.step, c.tags, c.metrics) for c in store.commits()] == [
            (2, None, (), {}),
            (1, 10, ("t",), {"loss": 2.5}),
        ]
        assert store.verify(full=True).ok
        loaded: Any = store.load()
        assert torch.equal(store.load(tag="t")["a"], torch.ones(1000))  # type: ignore[index]
    weight = torch.from_numpy(WEIGHT.copy())
    wanted = [weight, torch.from_numpy(STEPS.copy()), weight.T, torch.from_numpy(BIAS), torch.from_numpy(BIAS[:7])]
    for got, want in zip([*loaded["l"], loaded["p"], loaded["q"]], wanted, strict=True):
        assert torch.equal(got, want)
    with tierload.Store(tmp_path, mode="w") as store:
        store.save({"x": weight})
    assert len(rescue.commits(tmp_path)) == 3
