"""How processes end while saves are in flight: real scripts, ended in every way there is but SIGTERM.

Nothing here measures time. What has to come first is awaited: a line of the script, or of tierload on stderr.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import tierload
from tests.api.ending_scripts import FAILED, INT, WAITING, Start
from tests.cases.stores import assert_is

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
def test_an_end_waits_for_the_save(script: Start, how: str, end: str, status: int) -> None:
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


def test_several_saves(script: Start) -> None:
    run = script("FakeSave(1), FakeSave(2)")
    run.complains("tierload: waiting for the save of step 1 into runs/gpt, the save of step 2 into runs/gpt before")
    run.go()
    run.hears("saved")
    assert run.process.poll() is None
    run.go()
    assert run.ends() == 0
    assert run.out == "saved\nsaved\n"


def test_what_has_ended_is_not_mentioned(script: Start) -> None:
    run = script("save = FakeSave()\nsave.thread.join()")
    run.go()
    assert run.ends() == 0
    assert run.err == ""


def test_stores_are_closed_after_the_wait(script: Start, tmp_path: Path) -> None:
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


def test_without_stderr_it_waits_too(script: Start) -> None:
    for stderr in ("sys.stderr = None", "sys.stderr.close()"):
        run = script(f"{stderr}\nimport atexit\nFakeSave()\natexit.register(say, 'ending')")
        run.hears("ending")
        run.go()
        assert run.ends() == 0
        assert run.out == "ending\nsaved\n"


def test_interrupted_while_it_waits(script: Start) -> None:
    run = script("failed(150)\nFakeSave()")
    run.complains(WAITING)
    run.signal(signal.SIGINT)
    assert run.ends() == INT
    assert "tierload: interrupted: the save of step 200 into runs/gpt is not finished; the store is whole" in run.err
    assert "OSError: no room for step 150\n" in run.err, "what failed before is told all the same"
    assert "KeyboardInterrupt" not in run.err
    assert run.out == ""


@pytest.mark.parametrize(("end", "status"), [("", 1), ("sys.exit(3)", 3)])
def test_a_save_that_does_not_move_is_given_up(script: Start, end: str, status: int) -> None:
    run = script(f"FakeSave(grace=0.2)\n{end}")
    assert run.ends() == status
    assert "the save of step 200 into runs/gpt is not finished, and nothing has moved for 0.2 s" in run.err


def test_a_save_that_moves_is_not_given_up(script: Start) -> None:
    run = script("FakeSave(grace=0.5, moves=True)")  # the next line comes after a second
    run.complains("tierload: waiting for the save of step 200")
    run.go()
    assert run.ends() == 0
    assert run.out == "saved\n"


def test_a_hook_that_waits_for_what_was_given_up(script: Start) -> None:
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
def test_a_failure_that_nobody_was_told_of(script: Start, how: str, end: str, status: int) -> None:
    run = script(f"failed()\nprint('flushed', end='')\nsys.stdout.flush()\n{end}", how)
    assert run.ends() == status
    assert run.out == "flushed"
    if not end.startswith("os"):
        assert run.err.startswith(FAILED + "Traceback")
        assert run.err.count(FAILED) == 1


def test_a_failure_that_the_program_knows_of(script: Start) -> None:
    run = script("failed().flight.told()")
    assert run.ends() == 0
    assert run.err == ""
    run = script("one, other = failed(1), failed(2)\none.flight.told()\none.flight.told()")
    assert run.ends() == 1
    assert "step 1" not in run.err
    assert "no room for step 2" in run.err


def test_a_failure_while_the_end_waits(script: Start) -> None:
    run = script("FakeSave(error=OSError('no room for step 200'))")
    run.complains(WAITING)
    run.go()
    assert run.ends() == 1
    assert FAILED in run.err


def test_a_failure_keeps_no_memory(script: Start) -> None:
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


def test_a_fork_knows_nothing_of_its_parents_saves(script: Start) -> None:
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
