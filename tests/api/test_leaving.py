"""How processes end while saves are in flight: real scripts, ended in every way there is.

Nothing here measures time. What has to come first is awaited: a line of the script, or of tierload on stderr.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import tierload
from tests.cases.children import ROOT
from tests.cases.stores import assert_is

TERM, INT = -signal.SIGTERM, -signal.SIGINT
WAITING = "tierload: waiting for the save of step 200 into runs/gpt before the process ends: 1.0 KiB of about 1.0 MiB"
FINISHING = (
    "tierload: SIGTERM: finishing the save of step 200 into runs/gpt, for up to 600 s; a second signal ends at once\n"
)
FAILED = "tierload: the save of step 200 into runs/gpt failed in the background: OSError: no room for step 200\n"

_HANG_S = 60


class Script:
    """A script that runs in a process of its own."""

    def __init__(self, code: str, folder: Path, how: str = "file") -> None:
        torch = "import torch\n" * ("torch" in code or "tierload" in code)
        code = f"{torch}import os, signal, sys\nfrom tests.api.fake_saves import *\n{textwrap.dedent(code)}"
        path = folder / "script.py"
        path.write_text(code)
        words = {"file": [str(path)], "-c": ["-c", code], "-m": ["-m", "script"], "stdin": ["-"]}[how]
        go, self._go = os.pipe()
        environment = os.environ | {"GO": str(go), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[go],
            env=environment,
            text=True,
        )
        os.close(go)
        self._timer = threading.Timer(_HANG_S, self.process.kill)
        self._timer.start()
        if how == "stdin":
            assert self.process.stdin is not None
            self.process.stdin.write(code)
            self.process.stdin.close()
            self.process.stdin = None
        self.out = self.err = ""

    def hears(self, text: str) -> None:
        """Waits for a line on stdout."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out += line
            if line == text + "\n":
                return
        self._fail(text)

    def complains(self, text: str) -> None:
        """Waits for a line on stderr that begins so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err += line
            if line.startswith(text):
                return
        self._fail(text)

    def _fail(self, text: str) -> None:
        self.ends()
        pytest.fail(f"it ended ({self.process.returncode}) without {text!r}:\n{self.out}{self.err}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def go(self) -> None:
        """Lets the oldest save end."""
        os.write(self._go, b".")

    def ends(self) -> int:
        """Its status; ``out`` and ``err`` are then all that it wrote."""
        out, err = self.process.communicate()
        self.out += out
        self.err += err
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()
        os.close(self._go)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[object]:
    scripts = []

    def start(code: str, how: str = "file") -> Script:
        scripts.append(Script(code, tmp_path, how))
        return scripts[-1]

    yield start
    for one in scripts:
        one.__exit__(None, None, None)


# -- normal ends


@pytest.mark.parametrize(
    ("how", "end", "status"),
    [
        ("file", "", 0),
        ("file", "sys.exit(3)", 3),
        ("file", "raise ValueError('mine')", 1),
        ("-c", "", 0),
        ("-m", "sys.exit(0)", 0),
        ("stdin", "raise ValueError('mine')", 1),
    ],
)
def test_an_end_waits_for_the_save(script, how: str, end: str, status: int) -> None:
    run = script(f"save = FakeSave()\n{end}", how)
    run.complains(WAITING)
    assert run.process.poll() is None
    run.go()
    assert run.ends() == status
    assert run.out == "saved\n"
    first = run.err.splitlines()[0]
    assert first.startswith("Traceback" if end.startswith("raise") else WAITING), "the user's own error comes first"
    assert run.err.count("Traceback") == end.startswith("raise")
    assert ("ValueError: mine\n" in run.err) == end.startswith("raise")


def test_several_saves(script) -> None:
    run = script("FakeSave(1), FakeSave(2)")
    run.complains("tierload: waiting for the save of step 1 into runs/gpt, the save of step 2 into runs/gpt before")
    run.go()
    run.hears("saved")
    assert run.process.poll() is None
    run.go()
    assert run.ends() == 0
    assert run.out == "saved\nsaved\n"


def test_what_has_ended_is_not_mentioned(script) -> None:
    run = script("save = FakeSave()\nsave.thread.join()")
    run.go()
    assert run.ends() == 0
    assert run.err == ""


def test_stores_are_closed_after_the_wait(script, tmp_path: Path) -> None:
    """The save in the background still needs the store that the process holds."""
    run = script(f"""
        import tierload
        from tests.cases.stores import state_of
        path = {str(tmp_path / "store")!r}
        tierload.save(state_of(1), path, step=1)
        FakeSave(work=lambda: tierload.open(path, mode="w").save(state_of(2), step=2))
        held = tierload.open(path, mode="w")
        FakeSave(work=lambda: say(f"closed: {{held.closed}}"))
    """)
    run.complains("tierload: waiting for")
    run.go()
    run.hears("saved")
    run.go()
    assert run.ends() == 0
    assert "closed: False" in run.out
    assert_is(tierload.load(tmp_path / "store"), 2)


def test_without_stderr_it_waits_too(script) -> None:
    for stderr in ("sys.stderr = None", "sys.stderr.close()"):
        run = script(f"{stderr}\nimport atexit\nFakeSave()\natexit.register(say, 'ending')")
        run.hears("ending")
        run.go()
        assert run.ends() == 0
        assert run.out == "ending\nsaved\n"


def test_interrupted_while_it_waits(script) -> None:
    run = script("failed(150)\nFakeSave()")
    run.complains(WAITING)
    run.signal(signal.SIGINT)
    assert run.ends() == INT
    assert "tierload: interrupted: the save of step 200 into runs/gpt is not finished; the store is whole" in run.err
    assert "OSError: no room for step 150\n" in run.err, "what failed before is told all the same"
    assert "KeyboardInterrupt" not in run.err
    assert run.out == ""


@pytest.mark.parametrize(("end", "status"), [("", 1), ("sys.exit(3)", 3)])
def test_a_save_that_does_not_move_is_given_up(script, end: str, status: int) -> None:
    run = script(f"FakeSave(grace=0.2)\n{end}")
    assert run.ends() == status
    assert "the save of step 200 into runs/gpt is not finished, and nothing has moved for 0.2 s" in run.err


def test_a_save_that_moves_is_not_given_up(script) -> None:
    run = script("FakeSave(grace=0.5, moves=True)")  # the next line comes after a second
    run.complains("tierload: waiting for the save of step 200")
    run.go()
    assert run.ends() == 0
    assert run.out == "saved\n"


def test_a_hook_that_waits_for_what_was_given_up(script) -> None:
    """Such as one that closes the store: the process ends all the same, and says where its threads are."""
    run = script("""
        import atexit, threading
        leaving._LAST_S = 0.5
        atexit.register(threading.Event().wait)
        FakeSave(grace=0.2)
    """)
    assert run.ends() == 1
    assert "nothing has moved" in run.err
    assert "fake_saves.py" in run.err


# -- failures


@pytest.mark.parametrize(
    ("how", "end", "status"),
    [
        ("file", "", 1),
        ("file", "sys.exit(0)", 1),
        ("file", "sys.exit(3)", 3),
        ("file", "os._exit(0)", 0),
        ("-c", "", 1),
        ("-m", "", 1),
        ("stdin", "sys.exit(0)", 1),
    ],
)
def test_a_failure_that_nobody_was_told_of(script, how: str, end: str, status: int) -> None:
    run = script(f"failed()\nprint('flushed', end='')\nsys.stdout.flush()\n{end}", how)
    assert run.ends() == status
    assert run.out == "flushed"
    if not end.startswith("os"):
        assert run.err.startswith(FAILED + "Traceback")
        assert run.err.count(FAILED) == 1


def test_a_failure_that_the_program_knows_of(script) -> None:
    run = script("failed().flight.told()")
    assert run.ends() == 0
    assert run.err == ""
    run = script("one, other = failed(1), failed(2)\none.flight.told()\none.flight.told()")
    assert run.ends() == 1
    assert "step 1" not in run.err
    assert "no room for step 2" in run.err


def test_a_failure_while_the_end_waits(script) -> None:
    run = script("FakeSave(error=OSError('no room for step 200'))")
    run.complains(WAITING)
    run.go()
    assert run.ends() == 1
    assert FAILED in run.err


def test_a_failure_keeps_no_memory(script) -> None:
    """A traceback would keep what its frames hold: a whole staged state."""
    run = script("""
        import weakref
        class State: pass
        def fail():
            state = State()
            flight = leaving.begins("the save", lambda: (0, 1), grace_seconds=600)
            try:
                raise OSError("no room")
            except OSError as error:
                flight.ends(error)
            return weakref.ref(state)
        say(fail()())
    """)
    assert run.ends() == 1
    assert run.out == "None\n"


def test_a_fork_knows_nothing_of_its_parents_saves(script) -> None:
    run = script("""
        failed()
        save = FakeSave()
        if os.fork() == 0:
            save.flight.ends(OSError("not the child's"))
            sys.exit(0)
        say(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    run.hears("0")
    run.complains(WAITING)
    run.go()
    assert run.ends() == 1
    assert run.err.count(FAILED) == 1
    assert "not the child's" not in run.err


# -- SIGTERM


def test_a_termination_with_nothing_in_flight(script) -> None:
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
def test_a_termination_finishes_the_save(script, busy: str) -> None:
    run = script(f"FakeSave()\nsay('ready')\n{busy}")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.go()
    assert run.ends() == TERM
    assert run.out == "ready\nsaved\n"
    assert run.err == FINISHING


def test_a_termination_does_not_wait_for_later_saves(script) -> None:
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


def test_a_second_termination_ends_at_once(script) -> None:
    run = script("FakeSave()\nsay('ready')\nfor_ever()")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    assert run.out == "ready\n"
    assert run.err == FINISHING


def test_the_grace_is_over(script) -> None:
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


def test_no_grace(script) -> None:
    run = script("FakeSave(grace=0)\nsay('ready')\nfor_ever()")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    assert run.err.startswith("tierload: SIGTERM: not finished within 0 s: the save of step 200")


def test_a_save_that_fails_during_the_grace(script) -> None:
    run = script("FakeSave(error=OSError('no room for step 200'))\nsay('ready')\nfor_ever()")
    run.hears("ready")
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.go()
    assert run.ends() == TERM
    assert FAILED in run.err


def test_a_termination_while_the_end_waits(script) -> None:
    run = script("FakeSave()")
    run.complains(WAITING)
    run.signal(signal.SIGTERM)
    run.complains(FINISHING)
    run.signal(signal.SIGTERM)
    assert run.ends() == TERM
    assert run.out == ""


def test_a_reader_that_does_not_read(script) -> None:
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


def test_what_is_ignored_stays_ignored(script) -> None:
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
def test_a_handler_of_the_program_decides(script, order: str) -> None:
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


def test_a_handler_that_was_taken_back(script) -> None:
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
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): for_ever()
batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
child, = batches._workers
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
def test_children_end_at_once(script, child: str, status: int) -> None:
    """While their parent has a save in flight, and is not told to end."""
    run = script(f"FakeSave()\n{child}")
    run.hears(str(status))
    run.complains(WAITING)
    run.go()
    assert run.ends() == 0
    assert run.out == f"{status}\nsaved\n"


def test_a_fork_has_saves_of_its_own(script) -> None:
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


def test_a_forked_worker_waits_for_its_saves(script) -> None:
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
