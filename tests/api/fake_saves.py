"""A save in flight that writes nothing: for scripts that end while it is (``ending_scripts``).

The test holds the other end of a pipe: a byte in it lets one save end, whichever thread takes it.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import tierload

if "torch" not in sys.modules:
    # The engine's other modules import torch, which takes seconds; a script that needs them imports it first.
    _engine = types.ModuleType("tierload.engine")
    _engine.__path__ = [str(Path(tierload.__file__).parent / "engine")]
    sys.modules["tierload.engine"] = _engine

from tierload.engine import leaving

GO = int(os.environ.get("GO", "0"))


class FakeSave:
    def __init__(
        self,
        step: int = 200,
        *,
        grace: float = 600,
        error: BaseException | None = None,
        work: Callable[[], object] = lambda: None,
        moves: bool = False,
    ) -> None:
        self.calls = 0
        self.moves, self.error, self.work = moves, error, work
        self.flight = leaving.begins(f"the save of step {step} into runs/gpt", self.progress, grace_seconds=grace)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def progress(self) -> tuple[int, int]:
        self.calls += 1
        return (self.calls if self.moves else 1024), 1 << 20

    def _run(self) -> None:
        os.read(GO, 1)
        self.work()
        os.write(1, b"saved\n")
        self.flight.ends(self.error)


def failed(step: int = 200) -> FakeSave:
    """A save that failed a while ago."""
    save = FakeSave.__new__(FakeSave)
    save.flight = leaving.begins(f"the save of step {step} into runs/gpt", lambda: (0, 1), grace_seconds=600)
    try:
        raise OSError(f"no room for step {step}")
    except OSError as error:
        save.flight.ends(error)
    return save


def say(text: object) -> None:
    os.write(1, f"{text}\n".encode())


def for_ever() -> None:
    """A call into C that no signal ends: it is restarted."""
    import ctypes

    reading, _ = os.pipe()
    ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
