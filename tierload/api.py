"""What users call. One writer a process and store: it is opened at the first save and kept until the process ends."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from tierload.engine import Guard, HotStart, PendingSave, Store, guard, place, saves_together
from tierload.errors import CommitDropped, InvalidRequest, StoreFenced, StoreIOError, StorePoisoned
from tierload.settings import Settings
from tierload.types import Commit, RollbackPlan, SaveReport

if TYPE_CHECKING:
    import torch

    from tierload.heat import HeatMeter

__all__ = [
    "Guard",
    "HotStart",
    "PendingSave",
    "Store",
    "async_save",
    "guard",
    "hot_start",
    "load",
    "open",
    "prepare",
    "rollback",
    "save",
]

_ATTEMPTS = 20
_COLLECTED = "{}: commits are collected faster than they can be loaded; keep more of them"

_writers: dict[str, Store] = {}
_visits: dict[str, int] = {}  # how many use a store that is open for their sake only
_lock = threading.RLock()


def save(
    state: object,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
    note: str = "",
    settings: Settings | None = None,
    allow_pickle: bool = False,
    heat: HeatMeter | None = None,
) -> SaveReport:
    """Saves ``state`` into the store at ``path`` (made when it is not there) and returns when it is durable.

    ``state`` is what a training script holds: nested containers of tensors, modules, optimizers, numbers, texts, files.
    Only pages that changed since the last commit are written. This process then holds the store until it ends. In a job
    of torch.distributed all ranks call it, and make one commit (``Settings.ranks``). ``heat`` is the meter that
    follows the training: what it has measured of the state's parameters becomes a part of the commit (``Store.heat``).

    Raises:
        UnsupportedValue: Something in the state cannot be stored; it names the path. Nothing was written.
        StoreBusy: Another process writes to this store.
        StoreIOError: The disk is full or failed; earlier commits are whole, and the next save starts anew.
        RanksDisagree, RankLost: Ranks of the job do not save the same state, or one is gone; nothing was committed.
    """
    store = _writer(path, settings)
    try:
        return store.save(state, step=step, metrics=metrics, tags=tags, note=note, allow_pickle=allow_pickle, heat=heat)
    except (StoreIOError, StoreFenced, StorePoisoned):
        _let_go(store)  # so that the next save opens the store anew, and recovers what is there
        raise


def async_save(
    state: object,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
    note: str = "",
    settings: Settings | None = None,
    allow_pickle: bool = False,
    heat: HeatMeter | None = None,
) -> PendingSave:
    """Saves ``state`` as it is now, beside the caller, and returns in milliseconds; see ``save`` and ``PendingSave``.

    What is saved are the values of the call, whatever changes afterwards: they have been copied when it returns, but
    for parameters and states of optimizers that are guarded (``tierload.guard``), whose ``step`` waits for what is
    left. At most ``Settings.max_in_flight`` saves are under way; ``Settings.on_busy`` says what a further one does. The
    process does not end before they are durable, whatever ends it: its script, an exception, or SIGTERM (which is held
    back for ``Settings.grace_seconds``).

    Raises:
        UnsupportedValue: Something in the state cannot be stored; it names the path. Nothing was written.
        StoreBusy: Another process writes to this store.
        StoreIOError, ...: An earlier save in the background has failed, and nobody has asked for its result. This one
            was not begun.
    """
    store = _writer(path, settings)
    try:
        return store.async_save(
            state, step=step, metrics=metrics, tags=tags, note=note, allow_pickle=allow_pickle, heat=heat
        )
    except (StoreIOError, StoreFenced, StorePoisoned):
        _let_go(store)
        raise


def prepare(state: object, path: str | os.PathLike[str], *, settings: Settings | None = None) -> None:
    """Gets a store ready for ``async_save`` of a state like this (or of so many bytes, given an int), so that the first
    one is as fast as the others: memory is touched beside the caller."""
    _writer(path, settings).prepare(state)


def load(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    commit: str | Commit | None = None,
    tag: str | None = None,
    into: object = None,
    strict: bool = True,
    cast: bool = False,
    keys: str | Sequence[str] | None = None,
    types: Sequence[type] = (),
    allow_pickle: bool = False,
    rank: int | None = None,
    together: bool | None = None,
    lazy: bool = False,
) -> object:
    """Loads the newest commit (or that of a ``step``, ``commit`` id or ``tag``) and verifies every byte of it.

    Without ``into`` it returns the state; with it, modules, optimizers, tensors and dicts are filled in place and a
    ``LoadReport`` is returned. Where ``into`` has tensors that are spread over ranks, all of these have to call this
    (``together``). With ``lazy`` tensors are read when they are used, slices by page. See ``Store.load``.

    Raises:
        StoreNotFound, CommitNotFound, KeyMismatch, CorruptPage, CorruptStore: each says what, where and what to do.
    """
    with _lock:
        store = _held(path)
    options = {"step": step, "commit": commit, "tag": tag, "into": into, "strict": strict, "cast": cast}
    options |= {"keys": keys, "types": types, "allow_pickle": allow_pickle, "rank": rank}
    options |= {"together": together, "lazy": lazy}
    if store is not None:
        return store.load(**options)  # type: ignore[arg-type]
    for _ in range(_ATTEMPTS):
        with Store(path, mode="r") as reader:
            try:
                return reader.load(**options)  # type: ignore[arg-type]
            except CommitDropped:
                continue  # a run beside us saved and collected since we looked: there is a newer one
    raise CommitDropped(_COLLECTED.format(path))


def hot_start(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    commit: str | Commit | None = None,
    tag: str | None = None,
    key: str | None = None,
    example: tuple[Any, ...] | Mapping[str, Any] | None = None,
    strict: bool = True,
    cast: bool = False,
    progress: bool = False,
) -> HotStart:
    """Loads the newest commit (or that of a ``step``, ``commit`` id or ``tag``) into a model and its optimizer that are
    used meanwhile: it returns at once, and the first use of a tensor waits for that one alone. See ``HotStart``.

    The model is looked for in the stored state by the names of its tensors, or is at ``key``. Tensors arrive in the
    order in which a forward pass uses them: as an ``example`` of its arguments shows (nothing is computed), as the
    commit's heat recorded it, else as modules are registered. States of optimizers come last. Tensors on meta get their
    memory; a buffer on meta that is in no state dict has to be computed before, which is an error. ``progress`` shows
    on stderr how far it is.

    What cannot be made to wait is there when it returns: tensors that are spread over ranks, or are subclasses, and
    modules in TorchScript or with a loading of their own.

    Raises:
        StoreNotFound, CommitNotFound, KeyMismatch, CorruptPage, CorruptStore: each says what, where and what to do;
            nothing was changed. Damage that is met later is raised by the use that needs the page.
    """
    began = time.perf_counter()
    with _lock:
        store = _held(path)
    options = {"step": step, "commit": commit, "tag": tag, "key": key, "example": example}
    options |= {"strict": strict, "cast": cast, "progress": progress}
    if store is not None:
        return store.hot_start(model, optimizer, **options)  # type: ignore[arg-type]
    for _ in range(_ATTEMPTS):
        with Store(path, mode="r") as reader:
            try:
                return reader.hot_start(model, optimizer, **options, began=began)  # type: ignore[arg-type]
            except CommitDropped:
                continue
    raise CommitDropped(_COLLECTED.format(path))


def rollback(
    path: str | os.PathLike[str],
    to: int | str | Commit | None = None,
    *,
    lsn: int | None = None,
    steps: int | None = None,
    dry_run: bool = False,
) -> RollbackPlan:
    """Makes an earlier commit the newest again; see ``Store.rollback``. What came after stays, and can be had back.
    In a job of several ranks it is rank 0 that rolls back, without the others."""
    if dry_run:
        with Store(path, mode="r") as reader:
            return reader.rollback(to, lsn=lsn, steps=steps, dry_run=True)
    with Store(path, mode="r"):
        pass  # a path without a store is an error here, not a new store
    with _lock:
        store = _held(path)
    if store is not None:
        return store.rollback(to, lsn=lsn, steps=steps)
    if not saves_together(Settings()):
        return _writer(path, None).rollback(to, lsn=lsn, steps=steps)
    if place()[0] > 0:
        raise InvalidRequest(f"{os.fspath(path)}: rank 0 of this job rolls back, and no other rank")
    with Store(path, mode="w", settings=Settings(ranks="one")) as alone:  # and let go: all ranks will open it together
        return alone.rollback(to, lsn=lsn, steps=steps)


def open(
    path: str | os.PathLike[str],
    *,
    mode: Literal["r", "w"] = "r",
    settings: Settings | None = None,
    take_over: bool = False,
) -> Store:
    """Opens a store to look at it (``mode="r"``) or to hold it (``"w"``). In a process that holds the store already,
    ``"w"`` gives that same object. In a job all ranks open it for writing together, and rank 0 holds it."""
    if mode == "w" and not take_over:
        return _writer(path, settings)
    store = Store(path, mode=mode, settings=settings, take_over=take_over)
    if mode == "w":
        with _lock:
            _keep(path, store)
    return store


@contextmanager
def writing(path: str | os.PathLike[str], settings: Settings | None = None) -> Iterator[Store]:
    """A store that is open for writing, for those who come and go: when the last of them has gone, it is let go of,
    unless this process held it before. In a job all ranks do this together."""
    name = _name(path)
    with _lock:
        visited = name in _visits or _held(path) is None
        store = _writer(path, settings)
        if visited:
            _visits[name] = _visits.get(name, 0) + 1
    try:
        yield store
    except (StoreIOError, StoreFenced, StorePoisoned):
        _let_go(store)
        raise
    finally:
        with _lock:
            if visited:
                _visits[name] -= 1
                if not _visits[name]:
                    del _visits[name]
                    _let_go(store)


def _name(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(path)


def _held(path: str | os.PathLike[str]) -> Store | None:
    store = _writers.get(_name(path))
    return None if store is None or store.closed else store


def _writer(path: str | os.PathLike[str], settings: Settings | None) -> Store:
    with _lock:
        store = _held(path)
        if store is not None and store.together != saves_together(settings or store.settings):
            store.close()  # it was opened before the job was, or for one rank alone
            store = None
        if store is None:
            store = Store(path, mode="w", settings=settings)
            _keep(path, store)
        elif settings is not None:
            store.settings = settings
        return store


def _keep(path: str | os.PathLike[str], store: Store) -> None:
    for name in [name for name, held in _writers.items() if held.closed]:
        del _writers[name]  # it has memory and a file descriptor as long as it is known
    _writers[_name(path)] = store


def _let_go(store: Store) -> None:
    with _lock:
        for name in [name for name, held in _writers.items() if held is store]:
            del _writers[name]
    store.close()


@atexit.register
def _close_all() -> None:
    with _lock, ExitStack() as stack:  # what goes wrong in one of them keeps none of the others open
        for store in _writers.values():
            stack.callback(store.close)


def _forget() -> None:
    # A forked child has copies of the objects, but the locks are its parent's; the core lets go of them at the fork.
    global _lock
    _lock = threading.RLock()
    _writers.clear()
    _visits.clear()


os.register_at_fork(after_in_child=_forget)
