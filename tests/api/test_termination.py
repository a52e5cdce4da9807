"""SIGTERM while saves are in flight, or not: to a script in any call, with handlers of its own, and to its children."""

from __future__ import annotations

import os
import signal

import pytest

from tests.api.ending_scripts import FAILED, FINISHING, TERM, WAITING, Start


def test_a_termination_with_nothing_in_flight(script: Start) -> None:
    run = script("save = FakeSave()\nsave.thread.join()\nsay('ready')\nfor_ever()")
    run.go()
    run.hears("ready")
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    assert run.err == ""


@pytest.mark.parametrize(
    "busy",
    [
        "for_ever()",
        "while True: pass",
        "import time; time.sleep(1000)",
        "import torch\nwhile True: torch.ones(500, 500) @ torch.ones(500, 500)",
    ],
)
def test_a_termination_finishes_the_save(script: Start, busy: str) -> None:
    run = script(f"FakeSave()\nsay('ready')\n{busy}")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.go()
    assert run.ends() == TERM
    assert run.out == "ready\nsaved\n"
    assert run.err == FINISHING


def test_a_termination_does_not_wait_for_later_saves(script: Start) -> None:
    """The training loop goes on meanwhile, and saves again."""
    run = script("""
        FakeSave()
        say("ready")
        while not leaving._native.terminating(): pass
        leaving.begins("the save of step 300", lambda: (0, 1), grace_seconds=600)
        say("another")
        for_ever()
    """)
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.hears("another")
    run.go()
    assert run.ends() == TERM
    assert run.err == FINISHING


def test_a_second_termination_ends_at_once(script: Start) -> None:
    run = script("FakeSave()\nsay('ready')\nfor_ever()")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    assert run.out == "ready\n"
    assert run.err == FINISHING


def test_the_grace_is_over(script: Start) -> None:
    """Without any Python: the interpreter's lock is held for ever, by a call into C."""
    run = script("""
        import ctypes
        FakeSave(grace=0.2)
        say("ready")
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    """)
    run.hears("ready")
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    finishing, over = run.err.splitlines()
    assert finishing == FINISHING.strip().replace("600", "0.2")
    assert over.startswith(
        "tierload: SIGTERM: not finished within 0.2 s: the save of step 200 into runs/gpt; the store"
    )


def test_no_grace(script: Start) -> None:
    run = script("FakeSave(grace=0)\nsay('ready')\nfor_ever()")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    assert run.err.startswith("tierload: SIGTERM: not finished within 0 s: the save of step 200")


def test_a_save_that_fails_during_the_grace(script: Start) -> None:
    run = script("FakeSave(error=OSError('no room for step 200'))\nsay('ready')\nfor_ever()")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.go()
    assert run.ends() == TERM
    assert FAILED in run.err


def test_a_termination_while_the_end_waits(script: Start) -> None:
    run = script("FakeSave()")
    run.complains(WAITING)
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    assert run.out == ""


def test_a_reader_that_does_not_read(script: Start) -> None:
    """stderr is a pipe, and full: that does not hold up the end."""
    run = script("""
        full = os.pipe()[1]
        os.dup2(full, 2)
        os.set_blocking(2, False)
        try:
            while True: os.write(2, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(2, True)
        FakeSave()
        say("ready")
        for_ever()
    """)
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.go()
    assert run.ends() == TERM


def test_what_is_ignored_stays_ignored(script: Start) -> None:
    run = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        save = FakeSave()
        os.kill(os.getpid(), signal.SIGTERM)
        say("alive")
    """)
    run.hears("alive")
    run.complains(WAITING)
    run.go()
    assert run.ends() == 0
    assert "SIGTERM" not in run.err


@pytest.mark.parametrize("order", ["handle(); save = FakeSave()", "save = FakeSave(); handle()"])
def test_a_handler_of_the_program_decides(script: Start, order: str) -> None:
    run = script(f"""
        def handle():
            def handler(number, frame):
                say("handled")
                sys.exit(5)
            signal.signal(signal.SIGTERM, handler)
        {order}
        say("ready")
        while True: signal.pause()
    """)
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.hears("handled")
    run.complains(WAITING)
    run.go()
    assert run.ends() == 5
    assert run.out == "ready\nhandled\nsaved\n"
    assert "SIGTERM" not in run.err


def test_a_handler_that_was_taken_back(script: Start) -> None:
    """Python gives the default action as the one before, since it does not know of ours; the next save watches anew."""
    run = script("""
        FakeSave()
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        assert before is signal.SIG_DFL
        signal.signal(signal.SIGTERM, before)
        FakeSave(300)
        say("ready")
        for_ever()
    """)
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains("tierload: SIGTERM: finishing the save of step 200 into runs/gpt, the save of step 300 into runs/gpt")
    run.go()
    run.go()
    assert run.ends() == TERM
    assert run.out == "ready\nsaved\nsaved\n"


# -- other processes

_FORK = """
child = os.fork()
if child == 0:
    for_ever()
os.kill(child, signal.SIGTERM)
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
_MULTIPROCESSING = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=for_ever)
child.start()
child.terminate()
child.join()
say(child.exitcode)
"""
_LOADER = """
import torch.utils.data
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
works, working = os.pipe()
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        os.write(working, b"!")
        for_ever()
batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
child, = batches._workers
os.read(works, 1)  # before that, the worker has not installed handlers of its own
child.terminate()
child.join()
say(child.exitcode)
"""
_PROGRAM = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"], stdout=-1)
child.stdout.readline()
child.terminate()
say(child.wait())
"""


@pytest.mark.parametrize(
    ("child", "status"),
    [(_FORK, TERM), (_MULTIPROCESSING, TERM), (_PROGRAM, TERM), (_LOADER, 0)],  # torch's workers have their own way
)
def test_children_end_at_once(script: Start, child: str, status: int) -> None:
    """While their parent has a save in flight, and is not told to end."""
    run = script(f"FakeSave()\n{child}")
    run.hears(str(status))
    run.complains(WAITING)
    run.go()
    assert run.ends() == 0
    assert run.out == f"{status}\nsaved\n"


def test_a_fork_has_saves_of_its_own(script: Start) -> None:
    run = script("""
        FakeSave(100)
        if os.fork() == 0:
            FakeSave()
            say(os.getpid())
            for_ever()
        say(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    assert run.process.stdout is not None
    child = int(run.process.stdout.readline())
    os.kill(child, signal.SIGTERM)
    run.complains(FINISHING)
    run.go()  # one of the two gets it
    run.go()
    run.hears(str(TERM))
    assert run.ends() == 0
    assert run.out.count("saved") == 1 + 1


def test_a_forked_worker_waits_for_its_saves(script: Start) -> None:
    """multiprocessing ends it by os._exit."""
    run = script("""
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=FakeSave)
        child.start()
        child.join()
        say(child.exitcode)
    """)
    run.complains(WAITING)
    run.go()
    assert run.ends() == 0
    assert run.out == "saved\n0\n"
