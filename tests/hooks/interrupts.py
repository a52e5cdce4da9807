"""For training scripts in processes of their own: they tell their losses, and end where a test wants it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tierload.engine import writing

__all__ = ["Interrupted", "die_in_save", "maybe_end", "tell"]

KINDS = ("exception", "sigterm", "kill_in_save")


class Interrupted(Exception):
    """What a loop dies of."""


def tell(step: int, loss: Any) -> None:
    """Print the loss of a step (counted from 1), bit for bit."""
    sys.stdout.write(f"loss|{step}|{float(loss).hex()}\n")
    sys.stdout.flush()


def _when() -> tuple[str, int]:
    """What ends the script, and at which step: from the environment, where ``runs.train`` puts it."""
    kind, _, step = os.environ.get("INTERRUPT", "").partition("@")
    return kind, int(step or 0)


def maybe_end(step: int) -> None:
    """To be called in every step, after its optimizer's: raises, or asks for the end as a scheduler does."""
    kind, when = _when()
    if step == when and kind == "exception":
        raise Interrupted(f"in step {step}")
    if step == when and kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)


def die_in_save() -> None:
    """To be called before the first save: where a kill is asked for, the first save of that step or a later one writes
    everything, and is killed before the record that makes it a commit."""
    kind, when = _when()
    if kind != "kill_in_save":
        return
    whole = writing.save_state

    def save_state(native: Any, lock: Any, draft: Any, *rest: Any, **options: Any) -> Any:
        if draft.step is not None and draft.step >= when:
            options["committed"] = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        return whole(native, lock, draft, *rest, **options)

    writing.save_state = save_state
