"""What a commit of a trainer holds, and which one is meant."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from tierload.api import load
from tierload.api import open as open_store
from tierload.engine import HotStart, Store
from tierload.errors import CommitNotFound, InvalidRequest, KeyMismatch, StoreNotFound
from tierload.types import Commit

__all__ = [
    "BEST",
    "Resumed",
    "collect",
    "find",
    "live_parts",
    "load_best",
    "metrics_of",
    "newest",
    "resumed",
    "trainer_state",
]

_log = logging.getLogger(__name__)

BEST = "best"
"""The tag of the commit with the best metric."""

_STATE_FILE = "trainer_state.json"
_OPEN = ("log_history", "stateful_callbacks")  # its fields that callbacks put values of their own into
_NEEDED = ("trainer_state", "rng", "batches", "scheduler")  # and model and optimizer, which are loaded in place


def live_parts(trainer: Any) -> dict[str, Any]:
    """The objects that a commit is made of and that are loaded in place. Accelerate's wrappers hold nothing of their
    own: what is in them is saved, and guarded."""
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    parts = {
        "model": trainer.model,
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "scheduler": getattr(scheduler, "scheduler", scheduler),
    }
    scaler = getattr(trainer.accelerator, "scaler", None)
    return parts if scaler is None else parts | {"scaler": scaler}


def trainer_state(trainer: Any) -> dict[str, object]:
    """``trainer.state`` as plain values, with the states of its callbacks as they are now."""
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    stateful: list[Any] = [each for each in callbacks if isinstance(each, ExportableState)]
    trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
    return dict(vars(trainer.state))


def metrics_of(history: list[dict[str, Any]]) -> dict[str, float]:
    """The newest number of each name in a part of the log."""
    logged = {name: value for entry in history for name, value in entry.items() if name != "step"}
    return {name: float(value) for name, value in logged.items() if isinstance(value, (int, float))}


def newest(path: str) -> Commit | None:
    """The head of a store, if there are both."""
    try:
        with open_store(path) as store:
            return store.head()
    except StoreNotFound:
        return None


def find(path: str, which: Any) -> Commit | None:
    """The commit that ``resume_from_checkpoint`` means; None for none, and for a folder that is another checkpoint.

    Raises:
        StoreNotFound, CommitNotFound: There is none such.
    """
    if which is None or which is False:
        return None
    folder = isinstance(which, (str, os.PathLike)) and os.path.isdir(which)
    if folder and os.path.realpath(which) != os.path.realpath(path):
        return None
    with open_store(path) as store:
        if which is True or folder:
            return store.find()
        if isinstance(which, int):
            return store.find(step=which)
        if isinstance(which, Commit):
            return store.find(commit=which)
        text = os.fspath(which)
        return store.find(tag=text) if text in store.tags() else store.find(commit=text)


@dataclass(frozen=True)
class Resumed:
    """A commit that is being resumed from, and the best one of its line. ``folder`` has its ``trainer_state.json``,
    which transformers reads; ``values`` are those of its fields that may hold what is not for JSON."""

    path: str
    commit: Commit
    best: Commit | None
    folder: str
    values: dict[str, Any]
    rng: object
    batches: dict[str, Any] | None

    def complete(self, state: TrainerState) -> None:
        """Puts into a state, read from ``folder``, what is missing there."""
        for name, value in self.values.items():
            setattr(state, name, copy(value))  # it is added to, and may be resumed from once more

    def load(self, parts: dict[str, Any]) -> None:
        """Loads parts in place: all of them, or none and an error that lists every difference."""
        load(self.path, commit=self.commit, keys=list(parts), into=parts)

    def hot_start(self, parts: dict[str, Any]) -> HotStart:
        """The same, while they are used already."""
        with open_store(self.path) as store:
            return store.hot_start(parts["model"], commit=self.commit, keys=list(parts), into=parts)


@contextmanager
def resumed(path: str, commit: Commit) -> Iterator[Resumed]:
    """What is needed of a commit before the trainer has built what the rest is loaded into.

    Raises:
        InvalidRequest: The commit is not one that a training can go on from; it says what is missing.
    """
    with open_store(path) as store:
        parts = _read(path, store, commit)
        state = _known(parts["trainer_state"], path, commit)
        best = _best(store, state)
    state["best_model_checkpoint"] = path if best else None
    with tempfile.TemporaryDirectory(prefix="tierload-") as folder:
        values = {name: state.pop(name) for name in _OPEN}
        text = json.dumps(state, default=lambda value: value.item())  # the best metric may be a number of numpy's
        (Path(folder) / _STATE_FILE).write_text(text, encoding="utf-8")
        yield Resumed(path, commit, best, folder, values, parts["rng"], parts["batches"])


def _read(path: str, store: Store, commit: Commit) -> dict[str, Any]:
    try:
        parts: Any = store.load(commit=commit, keys=_NEEDED)
    except KeyMismatch as error:
        raise InvalidRequest(
            f"{path}: no training can go on from commit {commit.id[:12]} (step {commit.step}), for it has no "
            f"{', '.join(error.missing)}: it was saved with save_only_model, or by something else. Its weights alone "
            f"are loaded by tierload.load({path!r}, commit={commit.id[:12]!r}, keys='model', into={{'model': model}})"
        ) from error
    return parts  # type: ignore[no-any-return]


def _known(state: dict[str, Any], path: str, commit: Commit) -> dict[str, Any]:
    unknown = state.keys() - {field.name for field in fields(TrainerState)}
    if unknown:
        raise InvalidRequest(
            f"{path}: the trainer state of commit {commit.id[:12]} (step {commit.step}) has {sorted(unknown)}, which "
            f"transformers {transformers.__version__} does not know: resume with the release that saved it"
        )
    return state


def _best(store: Store, state: dict[str, Any]) -> Commit | None:
    """The commit that a trainer state has as its best, if it is still there."""
    step = state["best_global_step"]
    if step is None:
        return None
    try:
        return store.find(step=step)
    except CommitNotFound:
        return None


def load_best(path: str, model: Any, step: int) -> None:
    """Loads the weights of the best commit, which is that of ``step``; without it the model stays as it is."""
    with open_store(path) as store:
        best = store.tags().get(BEST)
    if best is None or best.step != step:
        _log.warning("%s has no commit of step %s, the best one: the model keeps its last weights", path, step)
        return
    load(path, commit=best, keys="model", into={"model": model})


def collect(store: Store, limit: int) -> None:
    """Leaves ``limit`` commits of the head's line: the newest, and the best in place of the oldest of them."""
    line = [commit for commit in store.commits() if not commit.superseded]
    if len(line) <= limit:
        return
    spared = any(BEST in commit.tags for commit in line[limit:])
    store.collect(keep=max(1, limit - spared))
