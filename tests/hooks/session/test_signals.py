"""SIGTERM to a loop: it saves the step that it is in and leaves; unless the program has its own way."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.hooks.runs import train
from tests.hooks.session.toys import saved
from tierload import Session


def test_a_handler_of_the_program_stays(store: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with Session(store, every=100, state={}) as run:
            for step in run.steps(4):
                if step == 2:
                    signal.raise_signal(signal.SIGTERM)
                    run.stop()  # what such a handler may do
        assert came == [signal.SIGTERM]
        assert saved(store) == [2]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("when", ["in a step", "in the last step"])
def test_a_signal_saves_and_leaves_by_system_exit(store: Path, when: str) -> None:
    last = 3 if when == "in the last step" else 10

    def loop() -> None:
        with Session(store, every=100, state={}) as run:
            for step in run.steps(last):
                if step == 3:
                    signal.raise_signal(signal.SIGTERM)
                    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second one ends the process"
            raise AssertionError("it goes on after the loop")

    with pytest.raises(SystemExit) as left:
        loop()
    assert left.value.code == 128 + signal.SIGTERM
    assert saved(store) == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_in_a_loop_that_is_broken_off_ends_the_program_after_the_block(store: Path) -> None:
    def loop() -> None:
        with Session(store, every=100, state={}) as run:
            for _ in run.steps(10):
                signal.raise_signal(signal.SIGTERM)
                break

    with pytest.raises(SystemExit):
        loop()
    assert saved(store) == []


def test_a_child_that_was_forked_in_a_step_ends_by_its_first_signal(store: Path) -> None:
    with Session(store, every=100, state={}) as run:
        for _ in run.steps(1):
            lives, living = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(living, b"!")  # what comes before, Python drops
                while True:
                    time.sleep(0.01)
            os.read(lives, 1)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_without_on_signal_nothing_is_taken_over(store: Path) -> None:
    with Session(store, every=100, on_signal=None, state={}) as run:
        for _ in run.steps(1):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_another_thread_there_are_no_signals(store: Path) -> None:
    def loop() -> None:
        with Session(store, every=1, state={}) as run:
            for _ in run.steps(2):
                pass

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert saved(store) == [1, 2]


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    ended = train("tests.hooks.session.script", tmp_path / "run", 10, interrupt="sigterm@4", TWICE="1")
    assert ended.status == -signal.SIGTERM, ended.output
    assert 4 not in ended.losses
