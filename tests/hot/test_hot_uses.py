"""Uses that a tensor on its way has to hear of, and what is left when it is there."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tierload
from tests.hot.starts import LONG_S, SMALL, WORDS, Model, assert_same, fresh, held, step, trained
from tests.state.alike import assert_alike
from tierload import CorruptPage, Settings
from tierload.engine.loading import table_of


class Own(torch.Tensor):
    """A subclass of a user."""


class Several(list):  # type: ignore[type-arg]
    """Of tensors."""


def settled(use: Callable[[], Any], go: threading.Event) -> Any:
    """What a use gives that began before anything had arrived, and waited."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(use()), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "it did not wait"
    go.set()
    thread.join(LONG_S)
    assert found, "it failed"
    return found[0]


def in_child(use: Callable[[], bool]) -> str:
    """What came of a use in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(use()).encode())
        except BaseException as error:  # noqa: BLE001
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


USES: dict[str, Callable[[Model], Any]] = {
    "a list of a user's": lambda model: torch._foreach_mul(Several(model.blocks[1].parameters()), 1.0),
    "as a subclass": lambda model: model.out.weight.as_subclass(Own).sum().as_subclass(torch.Tensor),
    "pickling a model": lambda model: dict(pickle.loads(pickle.dumps(model)).state_dict()),
    "dlpack": lambda model: torch.from_dlpack(model.blocks[0].norm.running_mean),
    "a whole graph": lambda model: torch.compile(lambda x: model.out(x), fullgraph=True, backend="eager")(
        torch.ones(32)
    ),
}


@pytest.mark.parametrize("use", USES)
def test_more_uses_wait(store: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    model, _ = trained(store)
    with held(monkeypatch) as go:
        warm, _ = fresh(2)
        tierload.hot_start(store, warm)
        found = settled(lambda: USES[use](warm), go)
    torch._dynamo.reset()
    torch.testing.assert_close(found, USES[use](model), rtol=0, atol=0)


def test_a_subclass_of_a_user_stays_one(store: Path) -> None:
    trained(store)
    warm, _ = fresh(2)
    tierload.hot_start(store, warm)
    assert type(nn.functional.linear(torch.ones(32).as_subclass(Own), warm.out.weight)) is Own


def test_a_parameter_made_like_one_on_its_way(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store)
    with held(monkeypatch):
        warm, _ = fresh(2)
        tierload.hot_start(store, warm)
        made = type(warm.out.weight)(torch.ones(3))
        assert copy.deepcopy(made).tolist() == [1.0] * 3
        assert type(made) is nn.Parameter


def test_a_save_stores_what_arrives(store: Path, ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(store)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        tierload.hot_start(store, warm, its)
        guard = tierload.guard(its)
        settled(lambda: tierload.async_save({"model": warm, "optimizer": its}, ram / "other").result(), go)
        assert not guard.reason
    again, his = fresh(3)
    tierload.load(ram / "other", into={"model": again, "optimizer": his})
    assert_same(model, again)
    assert_alike(optimizer.state_dict(), his.state_dict())


@pytest.mark.parametrize("load", ["load", "hot_start"])
def test_a_load_over_what_arrives_stays(store: Path, ram: Path, monkeypatch: pytest.MonkeyPatch, load: str) -> None:
    trained(store)
    other, its = fresh(7)
    step(other, its)
    tierload.save({"model": other, "optimizer": its}, ram / "other", settings=SMALL)
    with held(monkeypatch) as go:
        warm, his = fresh(2)
        boot = tierload.hot_start(store, warm, his)

        def over() -> bool:
            if load == "load":
                tierload.load(ram / "other", into={"model": warm, "optimizer": his})
            else:
                tierload.hot_start(ram / "other", warm, his).join()
            return True

        settled(over, go)
    boot.join()
    assert_same(other, warm)
    assert_alike(its.state_dict(), his.state_dict())


def test_an_optimizer_that_computes_with_its_states(store: Path) -> None:
    class Wide(torch.optim.SGD):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            for one in self.state.values():
                one["momentum_buffer"] = one["momentum_buffer"].double()

    def made() -> tuple[nn.Module, Wide]:
        model = nn.Linear(8, 8)
        return model, Wide(model.parameters(), lr=0.1, momentum=0.9)

    (model, optimizer), (warm, its) = made(), made()
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    tierload.save({"model": model, "optimizer": optimizer}, store)
    tierload.hot_start(store, warm, its).join()
    expected = [one["momentum_buffer"].double() for one in optimizer.state.values()]
    assert_alike([one["momentum_buffer"] for one in its.state.values()], expected)


def test_an_encoder_takes_the_same_way(store: Path) -> None:
    """It asks whether the tensors of its first layer are ordinary ones, and computes padded words otherwise."""

    def made() -> nn.TransformerEncoder:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()

    model, warm = made(), made()
    tierload.save({"model": model}, store, settings=SMALL)
    words, padded = torch.rand(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    tierload.hot_start(store, warm)
    with torch.no_grad():
        assert torch.equal(warm(words, src_key_padding_mask=padded), model(words, src_key_padding_mask=padded))


def test_nothing_is_left(store: Path) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def locked() -> str:
        return next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmLck" in line)

    trained(store)
    before, unlocked, hooks = files(), locked(), dict(nn.modules.module._global_forward_pre_hooks)
    threads = set(threading.enumerate())
    warm, its = fresh(2)
    boot = tierload.hot_start(store, warm, its)
    boot.join()
    assert files() <= before
    assert set(threading.enumerate()) <= threads
    assert nn.modules.module._global_forward_pre_hooks == hooks
    gone = [weakref.ref(one) for one in (boot, warm, boot._arrivals)]
    del boot
    assert locked() == unlocked
    del warm, its
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_a_dropped_one_arrives_and_is_gone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store)
    hooks = dict(nn.modules.module._global_forward_pre_hooks)
    with held(monkeypatch):
        warm, _ = fresh(2)
        boot = tierload.hot_start(store, warm)
        arrivals, gone = weakref.ref(boot._arrivals), weakref.ref(warm)
        del boot, warm
    end = time.monotonic() + LONG_S
    while (arrivals(), gone()) != (None, None) and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert (arrivals(), gone()) == (None, None)
    assert nn.modules.module._global_forward_pre_hooks == hooks


def test_torchs_compiler_is_not_loaded() -> None:
    code = "import sys, tierload; tierload.hot_start; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=LONG_S).returncode == 0


def test_a_forked_process_reads_by_itself(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained(store)
    expected = model.eval()(WORDS).detach()
    with held(monkeypatch):
        warm, _ = fresh(2)
        boot = tierload.hot_start(store, warm.eval())

        def computes() -> bool:
            return torch.equal(warm(WORDS).detach(), expected)

        assert in_child(computes) == "True"
        assert in_child(lambda: in_child(computes) == "True") == "True"
        assert in_child(lambda: boot.join() is boot.report and boot.ready) == "True"
        assert not boot.ready
    for seed in range(3):  # while others work
        warm = fresh(seed)[0].eval()
        tierload.hot_start(store, warm)
        assert in_child(lambda warm=warm: torch.equal(warm(WORDS).detach(), expected)) == "True"


@pytest.mark.parametrize("what", ["rollback", "collect", "save", "delete"])
def test_what_becomes_of_the_store(store: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    model, optimizer = trained(store)
    state = {"model": model, "optimizer": optimizer}
    step(model, optimizer)
    tierload.save(state, store, step=3)
    expected = copy.deepcopy(model)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        boot = tierload.hot_start(store, warm, its)
        if what == "rollback":
            tierload.rollback(store, 2)
        elif what == "delete":
            shutil.rmtree(store)
        else:
            step(model, optimizer)
            tierload.save(state, store, step=4)
        if what == "collect":
            held_store = tierload.api._held(store)
            assert held_store is not None
            assert len(held_store.collect(keep=1).dropped) == 2
        go.set()
        if what != "delete":
            boot.join()
            assert_same(expected, warm)
            return
        for use in (boot.join, lambda: warm(WORDS), lambda: warm(WORDS), lambda: step(warm, its)):
            with pytest.raises(CorruptPage, match="the segment is missing") as error:
                use()
            assert error.value.key.startswith("model/")


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_damage_is_raised_where_it_matters(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Modules before it work, and the one that needs it raises each time."""
    torch.manual_seed(1)
    model, warm = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    tierload.save({"model": model}, store, settings=Settings(page_bytes=4096, compression="off", pack_below_bytes=1024))
    with tierload.open(store) as opened:
        commit = opened.head()
        assert commit is not None
        manifest = opened._native.manifest(commit.txid)
        keys = [info.key for info in opened.keys(commit)]
    table, number = table_of(manifest), keys.index("model/1.weight")
    rows = table.pages
    page = max(n for n in range(len(rows)) if number in table.page_owner(n))
    segment, offset = store / manifest.segment_path(int(rows["segment"][page])), int(rows["offset"][page])
    data = bytearray(segment.read_bytes())
    data[offset] ^= 1
    segment.write_bytes(data if damage == "flipped" else data[: offset + 1])
    boot = tierload.hot_start(store, warm)
    x = torch.ones(64)
    if damage == "flipped":
        assert torch.equal(warm[0](x), model[0](x))
    for use in (lambda: warm(x), lambda: warm(x), lambda: warm[1].weight + 0, boot.join):
        with pytest.raises(CorruptPage) as error:
            use()
        if damage == "flipped":
            assert (error.value.key, error.value.page, error.value.offset) == ("model/1.weight", page, offset)
            assert error.value.path in str(segment)
    assert "meets a damaged page" in caplog.text


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "a wrapper that is made": lambda model: nn.parallel.DistributedDataParallel(model) and True,
    "broadcast": lambda model: dist.broadcast(model.blocks[0].norm.running_mean, 0) or True,
    "all_reduce": lambda model: dist.all_reduce(model.blocks[0].norm.running_mean) or True,
}


@pytest.mark.parametrize("use", WRAPPED)
def test_what_ranks_share_waits(store: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """It goes to C++ as it is."""
    model, _ = trained(store)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with held(monkeypatch) as go:
            warm, _ = fresh(2)
            boot = tierload.hot_start(store, warm)
            settled(lambda: WRAPPED[use](warm), go)
        boot.join()
        assert_same(model, warm)
    finally:
        dist.destroy_process_group()
