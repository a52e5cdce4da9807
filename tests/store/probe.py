"""Everything that a user may do with a store that somebody else made, call by call, in a child that is limited."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierload
from tests.rescue.builder import Builder
from tests.store.support import SMALL, in_child
from tierload import TierloadError

Outcomes = dict[str, tuple[str, str]]
"""By call: the class of the error ("" for none, "!" before one that tierload did not raise on purpose), its text."""

MEMORY_MIB = 192
SECONDS = 4


META = {"metrics": {"d": {}}}


class Forger(Builder):
    """A builder whose records may be changed before they are sealed: by type, with what makes new payloads of old."""

    def __init__(self, root: Path, twists: dict[int, Callable[[bytes], bytes]] | None = None, **more: Any) -> None:
        self.twists = twists or {}
        super().__init__(root, **more)

    def record(self, kind: int, payload: bytes, txid: int = 0, last: bool = True, flags: int = 0) -> int:
        twist = self.twists.get(kind)
        return super().record(kind, payload if twist is None else twist(payload), txid, last, flags)


def probe(path: Path, *, writing: bool = True) -> Outcomes:
    """Opens a store, looks at everything, and writes to it."""
    outcome = in_child(lambda: _look(path) | (_write(path) if writing else {}), seconds=SECONDS, mib=MEMORY_MIB)
    if outcome.signal or outcome.error:
        return {"child": (f"!signal {outcome.signal} {outcome.error}", outcome.trace)}
    found: Outcomes = outcome.value
    return found


def unclean(outcomes: Outcomes) -> list[str]:
    """What went wrong otherwise than by an error of tierload's own."""
    return [f"{call}: {error} {text}" for call, (error, text) in outcomes.items() if error.startswith("!")]


def _attempt(found: Outcomes, name: str, call: Callable[[], Any]) -> Any:
    start = time.process_time()
    try:
        value = call()
    except TierloadError as error:
        found[name] = (type(error).__name__, str(error))
        if not str(error).strip("'\""):
            found[name] = ("!no message", repr(error))
        return None
    except BaseException as error:  # noqa: BLE001
        found[name] = (f"!{type(error).__name__}", f"{error} {traceback.format_exc(limit=-2)}")
        return None
    seconds = time.process_time() - start
    found[name] = ("", "") if seconds < SECONDS / 2 else ("!slow", f"{seconds:.1f} s")
    return value


def _look(path: Path) -> Outcomes:
    warnings.simplefilter("ignore")
    found: Outcomes = {}
    store = _attempt(found, "open", lambda: tierload.open(path, settings=SMALL))
    if store is None:
        return found
    commits = _attempt(found, "commits", store.commits) or []
    _attempt(found, "head", store.head)
    _attempt(found, "tags", store.tags)
    _attempt(found, "recorded", store.recorded)
    _attempt(found, "history", lambda: list(store.history()))
    _attempt(found, "keys", store.keys)
    _attempt(found, "load", store.load)
    for commit in commits[:4]:
        _attempt(found, f"load {commit.txid}", lambda commit=commit: store.load(commit=commit))
        _attempt(found, f"diff {commit.txid}", lambda commit=commit: store.diff(commit, commits[0]))
    report = _attempt(found, "verify", lambda: store.verify(full=True))
    found["damage"] = ("", "; ".join(damage.message for damage in report.damages) if report else "")
    _attempt(found, "close", store.close)
    return found


def _write(path: Path) -> Outcomes:
    """A writer that is let in must keep what it acknowledges."""
    found: Outcomes = {}
    store = _attempt(found, "open for writing", lambda: tierload.Store(path, mode="w", settings=SMALL))
    if store is None:
        return found
    _attempt(found, "record", lambda: store.record("of the probe", 1))
    state = {"saved by": torch.full((5,), 17)}
    saved = _attempt(found, "save", lambda: store.save(state))
    _attempt(found, "tag", lambda: store.tag("of the probe"))
    _attempt(found, "collect", store.collect)
    _attempt(found, "collect 1", lambda: store.collect(keep=1))
    _attempt(found, "rollback", lambda: store.rollback(steps=1, dry_run=True))
    _attempt(found, "close writer", store.close)
    if saved is not None:
        name = "load what was saved"
        again = _attempt(found, name, lambda: tierload.load(path, commit=saved.commit.id))
        if again is None or not torch.equal(again["saved by"], state["saved by"]):
            found["what was saved"] = ("!lost", f"an acknowledged commit is gone: {found[name]}")
    return found
