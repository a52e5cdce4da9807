"""Processes that end while a real save is in flight: scripts whose last statement is ``async_save``, and what is in
the store afterwards. How a process ends with saves that are none is in tests/api."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import tierload
from tests.api.ending_scripts import INT, TERM
from tests.cases.stores import unreferenced
from tests.saves.failing import running

START = """
import tierload
from tests.saves.failing import *
store = {store!r}
tierload.save(noise(1, 64), store, step=1, settings=capped({cap}))
"""
SAVE = START + "pending = tierload.async_save(noise(2, 64), store, step=2)\n"


def assert_newest(store: Path, number: int) -> None:
    """It can be opened by anybody, all that is in it is whole, and nothing is left over that a collection keeps."""
    assert tierload.load(store)["number"] == number
    with tierload.Store(store, mode="w") as held:
        assert [commit.step for commit in held.commits()] == list(range(number, 0, -1))
        assert held.verify(full=True).ok
        held.collect()
    assert not unreferenced(store)
    assert not (store / "LIVE").exists()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", INT),
        ("with tierload.open(store, mode='w'): raise ValueError('mine')", 1),
        ("import atexit; atexit.register(lambda: pending.result())", 0),
    ],
)
def test_b11_the_last_save_is_there(store: Path, tmp_path: Path, end: str, status: int) -> None:
    with running(tmp_path, SAVE.format(store=str(store), cap=0.1) + end) as run:
        assert run.ends() == status
        assert run.err.count("Traceback") == end.count("raise")
        assert ("ValueError: mine" in run.err) == ("ValueError" in end)
    assert_newest(store, 2)


def test_b17_without_a_main_guard(store: Path, tmp_path: Path) -> None:
    """200 saves beside forked workers and threads that load data, in a script from stdin."""
    code = (
        START.format(store=str(store), cap=0)
        + """
import threading
import torch.utils.data
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index): return torch.tensor(index)
threading.Thread(target=lambda: [threading.Event().wait(0.001) for _ in range(300)]).start()
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
for step, batch in enumerate(batches, 2):
    tierload.async_save(noise(step, 8), store, step=step)
"""
    )
    with running(tmp_path, code, "stdin") as run:
        assert run.ends() == 0
        assert run.err == ""
    assert_newest(store, 201)


def test_workers_that_live_when_the_process_ends(store: Path, tmp_path: Path) -> None:
    """They take nothing of the parent's save with them, nor wait for it."""
    code = (
        SAVE.format(store=str(store), cap=0.1)
        + """
import torch.utils.data
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index): return torch.tensor(index)
batches = iter(torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"))
next(batches)
"""
    )
    with running(tmp_path, code) as run:
        assert run.ends() == 0
        assert run.err == ""
    assert_newest(store, 2)


def test_a_forked_child_trains(store: Path, tmp_path: Path) -> None:
    """While its parent's save still copies from guarded memory: it steps, saves elsewhere, and ends."""
    code = f"""
import tierload
from tests.saves.failing import *
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
model = torch.nn.Linear(4096, 7680, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tierload.guard(optimizer)
model.weight.grad = torch.ones_like(model.weight)
settings = Settings(host_budget_bytes=64 << 20, bandwidth_cap_mbps=20, page_bytes=1 << 20)
pending = tierload.async_save(model.weight, {str(store)!r}, step=1, settings=settings)
assert pending.copies
child = os.fork()
if child == 0:
    import signal
    signal.alarm(60)
    optimizer.step()
    tierload.save(noise(1, 8), {str(store) + "2"!r})
    del pending
    sys.exit(0)
assert not pending.done()
say(child_ends(child))
optimizer.step()
pending.result()
"""
    with running(tmp_path, code) as run:
        assert run.ends() == 0, run.err
        assert run.out == "0\n"
        assert run.err.count("copies in waves") == 1
    assert tierload.load(str(store) + "2")["number"] == 1


# -- SIGTERM


def test_terminated(store: Path, tmp_path: Path) -> None:
    with running(tmp_path, SAVE.format(store=str(store), cap=0.05) + "say('ready')\nfor_ever()") as run:
        run.hears("ready")
        run.signal(signal.SIGTERM)
        assert run.ends() == TERM
        assert run.err == (
            f"tierload: SIGTERM: finishing the save of step 2 into {store}, for up to 25 s; "
            "a second signal ends at once\n"
        )
    (store / "LIVE").unlink(missing_ok=True)
    assert_newest(store, 2)


def test_terminated_twice(store: Path, tmp_path: Path) -> None:
    code = SAVE.format(store=str(store), cap=0.1)
    code += "pending.result()\ntierload.async_save(noise(3, 1024), store, step=3, settings=HELD)\n"
    with running(tmp_path, code + "say('ready')\nfor_ever()") as run:
        run.hears("ready")
        run.signal(signal.SIGTERM)
        run.complains("tierload: SIGTERM: finishing the save of step 3")
        run.signal(signal.SIGTERM)
        assert run.ends() == TERM
    (store / "LIVE").unlink(missing_ok=True)
    assert_newest(store, 2)


# -- failures


@pytest.mark.parametrize(
    ("policy", "end", "status"),
    [("raise", "", 1), ("raise", "sys.exit(3)", 3), ("raise", "raise ValueError('mine')", 1), ("warn", "", 0)],
)
def test_a_failure_that_nobody_asked_for(store: Path, tmp_path: Path, policy: str, end: str, status: int) -> None:
    """Other stores are closed all the same: what was recorded in them is durable."""
    code = f"""
import tierload
from tests.saves.failing import *
from tierload import _native
other = tierload.open({str(store) + "2"!r}, mode="w")
held = Failing({str(store)!r}, _native.Faults())
tierload.api._writers[os.path.realpath(held.path)] = held
last = tierload.open({str(store) + "3"!r}, mode="w")
for one in (other, held, last):
    one.save(noise(1, 8), step=1)
    one.record("x", 5, sync=False)
held.fails({policy!r})
{end}
"""
    with running(tmp_path, code) as run:
        assert run.ends() == status
        told = run.err.count("failed in the background: tierload.errors.StoreIOError: [Errno 5] write")
        assert told == (policy == "raise")
        assert run.err.count("has failed: [Errno 5] write") == 1, "in the log"
        assert "atexit" not in run.err, "and not once more"
        assert ("ValueError: mine" in run.err) == ("ValueError" in end)
    for name in ("2", "3"):
        with tierload.Store(str(store) + name) as reader:
            assert reader.recorded() == {"x": 5}
    with tierload.Store(store) as reader:
        assert [commit.step for commit in reader.commits()] == [1]


def test_b13_a_run_that_is_tried_again_in_the_same_process(store: Path, tmp_path: Path) -> None:
    """Its saves of the same steps are its own, and a late end of an earlier one finishes nothing of them."""
    code = f"""
import tierload
from tests.saves.failing import *
def train(run):
    saves = []
    for step in (1, 2, 3):
        saves.append(tierload.async_save(noise(100 * run + step, 16), {str(store)!r}, step=step, settings=capped(0.2)))
        if run == 0 and step == 3:
            raise RuntimeError("a failure of the run")
    return saves
try:
    train(0)
except RuntimeError:
    tierload.rollback({str(store)!r}, 1)
    saves = train(1)
found = [tierload.load({str(store)!r}, commit=save.durable())["number"] for save in saves]
assert found == [101, 102, 103], found
assert [save.step for save in saves] == [save.durable().step for save in saves]
"""
    with running(tmp_path, code) as run:
        assert run.ends() == 0, run.err
    with tierload.Store(store) as reader:
        assert reader.load()["number"] == 103  # type: ignore[index]
        for commit in reader.commits():
            assert reader.load(commit=commit)["number"] % 100 == commit.step  # type: ignore[index]


def test_b18_two_trainers_at_once(store: Path, tmp_path: Path) -> None:
    """They need no ports and no names in common."""
    code = (
        START
        + """
saves = [tierload.async_save(noise(step, 64), store, step=step) for step in (2, 3, 4)]
say("ready")
sys.stdin.read(1)
"""
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stores = [f"{store}{name}" for name in "ab"]
    with (
        running(tmp_path / "a", code.format(store=stores[0], cap=0.5)) as first,
        running(tmp_path / "b", code.format(store=stores[1], cap=0.5)) as second,
    ):
        for run in (first, second):
            run.hears("ready")
            children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
            assert children == "", "no helper process"
            links = []
            for entry in Path(f"/proc/{run.process.pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # it was closed meanwhile
                    links.append(os.readlink(entry))
            assert not [link for link in links if link.startswith("socket:")]
        for run in (first, second):
            assert run.ends() == 0
    for name in stores:
        assert_newest(Path(name), 4)
