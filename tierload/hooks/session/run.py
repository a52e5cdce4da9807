"""The plain training loop: ``with tierload.Session(path, model=model, …) as run: for step in run.steps(1000): …``."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.utils.data import DataLoader

from tierload import api
from tierload.catalog import parse_best
from tierload.engine import HotStart, Store, place, tags_of
from tierload.errors import InvalidRequest, TierloadError
from tierload.hooks.metering import HEAT, check, meter_of, stored_heat
from tierload.hooks.session.keeping import Keeping, Retention
from tierload.hooks.session.loaders import Batches
from tierload.hooks.session.parts import OWN, first_trained, guard_optimizers, state_of, trained
from tierload.hooks.session.stopping import Stopping
from tierload.observe import say
from tierload.settings import Settings
from tierload.state import RNG, rng
from tierload.types import Commit

if TYPE_CHECKING:
    from tierload.heat import HeatMeter

__all__ = ["Session"]

_in_use: weakref.WeakSet[Store] = weakref.WeakSet()
"""A session closes its store, which a process has once: two of them cannot share it."""


class Session:
    """A training run that saves itself every so many steps, and goes on from its newest commit when it is started anew.

    ``parts`` are what the run consists of, by name: modules, optimizers, schedulers, gradient scalers, loaders
    (torchdata's ``StatefulDataLoader``), tensors, dicts of values, anything with ``state_dict``. They are loaded in
    place when the ``with`` block begins, with the random states of the process and the number of steps done. Optimizers
    are guarded (``tierload.guard``), so saves are copied beside the next step.

    ``keep`` newest commits stay, and with it those of ``keep_every`` steps, the one with the best value of a metric
    (``keep_best="loss:min"`` or ``"accuracy:max"``), and the newest whose metrics are all finite; without ``keep`` all
    stay. With ``on_signal="save"``, SIGTERM makes the loop save after the step that it is in, and end the program by
    ``SystemExit`` (status 143); a second one ends it at once.

    With ``heat=True`` a meter follows the module that the optimizer trains, while the block runs; ``heat=`` also takes
    a ``tierload.heat.HeatMeter`` of the program's. Commits have the heat of their tensors (``Store.heat``), and what
    the meter has measured, from which it goes on; ``run.meter`` is the meter.

    With ``hot_start=True`` a run that goes on does not wait for its weights and the states of its optimizers: they
    arrive while the first batches are read, and each waits for its first use alone (``Store.hot_start``);
    ``run.hot_start`` tells how far they are. A save, and the end of the block, wait for all of them.

    In a job of torch.distributed all ranks do all of this together.

    Raises:
        InvalidRequest: An argument makes no sense, or a part could not be resumed; it says which and what to do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        /,
        *,
        every: int,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        on_signal: Literal["save"] | None = "save",
        settings: Settings | None = None,
        heat: HeatMeter | bool = False,
        hot_start: bool = False,
        **parts: object,
    ) -> None:
        if type(every) is not int or every < 1:
            raise InvalidRequest(f"every is {every!r}; use a number of steps from 1 up")
        if on_signal not in ("save", None):
            raise InvalidRequest(f'on_signal is {on_signal!r}; use "save" or None')
        for name, least in (("keep", keep), ("keep_every", keep_every)):
            if least is not None and (type(least) is not int or least < 1):
                raise InvalidRequest(f"{name} is {least!r}; use a number from 1 up, or None")
        if keep is None and (keep_every is not None or keep_best is not None):
            raise InvalidRequest("keep_every and keep_best need keep: how many of the newest commits to keep besides")
        if keep_best is not None:
            parse_best(keep_best)
        check(heat)
        if type(hot_start) is not bool:
            raise InvalidRequest(f"hot_start is {hot_start!r}; use True or False")
        self.resumed: Commit | None = None
        self.meter: HeatMeter | None = None
        self.hot_start: HotStart | None = None
        self._hot = hot_start
        self._heat = heat
        self._path = path
        self._every = every
        self._retention = Retention(keep, keep_every, keep_best)
        self._settings = settings
        self._own: dict[str, Any] = {"step": 0}
        self._state, self._loaders = state_of(parts)
        self._state[OWN] = self._own
        if heat is True:
            trained(self._state)
        self._metrics: dict[str, object] = {}
        self._tags: tuple[str, ...] = ()
        self._due = False
        self._loop: object = None  # the one that runs: a generator may be closed when another one does
        self._in_step = False  # its body runs, or was left in its middle
        self._stopping = Stopping(on_signal=on_signal == "save")
        self._prepared = False
        self._store: Store | None = None
        self._keeping: Keeping | None = None

    @property
    def step(self) -> int:
        """How many steps are done, by all runs together."""
        step: int = self._own["step"]
        return step

    def __enter__(self) -> Self:
        if self._store is not None:
            raise InvalidRequest(f"{self._path}: this session has begun already")
        self.resumed, self.hot_start, self._in_step, self._loop = None, None, False, None
        self._metrics, self._tags, self._due = {}, (), False
        store = api.open(self._path, mode="w", settings=self._settings)
        if store in _in_use:
            raise InvalidRequest(f"{self._path}: another session of this process has not left its with block yet")
        try:
            measured = self._resume(store)
            guard_optimizers(self._state)
            if store.together:
                self._stopping.join(store.settings.rank_timeout_seconds)
            if self._retention.keep is not None and not (store.together and place()[0]):  # rank 0 holds the store
                self._keeping = Keeping(store, self._retention)
            self._measure(measured)
        except BaseException:
            store.close()
            raise
        self._store = store
        _in_use.add(store)
        return self

    def _resume(self, store: Store) -> Mapping[str, Any] | None:
        """Everything as it was at the newest commit, if there is one: random states last. Gives the state of its meter,
        which a commit may have or not, whatever this session has."""
        measured = None
        if store.head() is not None:
            try:
                measured = stored_heat(store)
                target = self._state if measured is None else self._state | {HEAT: None}
                if self._hot:
                    self.hot_start = store.hot_start(first_trained(self._state), into=target)
                else:
                    store.load(into=target)
            except TierloadError as error:
                error.add_note(
                    f"The newest commit of {store.path} does not fit the parts of this session. To begin another run, "
                    "use another path; `tierload log` shows what there is, `tierload show` what it holds"
                )
                raise
            line = (commit for commit in store.commits() if not commit.superseded)
            self.resumed = next((commit for commit in line if commit.step == self.step), store.head())
        now = rng.capture(RNG())
        for loader in self._loaders:
            loader.start()
        rng.restore(RNG(), now)
        return measured

    def _measure(self, measured: Mapping[str, Any] | None) -> None:
        """Follows the training from here, or from what was ``measured`` before."""
        if self._heat is False:
            return
        if self._heat is True:
            self.meter = meter_of(*trained(self._state))
        else:
            self.meter = self._heat
        if measured is not None:
            self.meter.load_state_dict(measured)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_loop()
        store, self._store = self._opened(), None
        if self._heat is True and self.meter is not None:
            self.meter.close()
        _in_use.discard(store)
        keeping, self._keeping = self._keeping, None
        try:
            if error is None:
                if self.hot_start is not None:
                    self.hot_start.join()
                    self.hot_start.close()
                store.wait()
            if keeping is not None:
                keeping.finish(collect=error is None)
        except BaseException as failure:
            if error is None or not isinstance(failure, TierloadError):
                store.__exit__(type(failure), failure, failure.__traceback__)
                raise
            error.add_note(f"Besides, {failure}")  # the caller's own error is the one that is raised
        store.__exit__(kind, error, trace)
        if error is None:
            self._leave()

    # The loop

    def steps(self, n: int) -> Iterator[int]:
        """Counts the steps of the whole run up to ``n``, from 1; a resumed run does those that are left.

        After each one that ``every`` divides, what was there at its end is saved beside the next ones. When the loop
        has done all ``n``, or was asked to stop, its last step is saved, and durable. A loop that is left by ``break``
        or an exception saves nothing of the step that it was in.

        Raises:
            InvalidRequest: ``n`` is no whole number, or an earlier loop was left in the midst of a step.
        """
        self._opened()
        try:
            n = operator.index(n)
        except TypeError:
            raise InvalidRequest(f"steps({n!r}): use a whole number of steps") from None
        self._check_whole()
        self._stopping.watch()
        loop = self._loop = object()
        try:
            while self.step < n:
                self._set_in_step(True)
                yield self.step + 1
                if self._loop is not loop:
                    raise InvalidRequest(f"{self._path}: the session of this loop has ended")
                self._set_in_step(False)
                self._own["step"] += 1
                if self._end_step(n):
                    break
        finally:
            if self._loop is loop:
                self._end_loop()
        self._leave()

    def batches(self, loader: DataLoader[Any]) -> Batches:
        """All batches of a loader that is a part of this session, epoch after epoch, from where the run stands:
        ``x, y = next(batches)``. ``batches.epoch`` counts from 0.

        Raises:
            InvalidRequest: It is no part.
        """
        for batches in self._loaders:
            if batches.of(loader):
                return batches
        raise InvalidRequest(
            "the loader is no part of this session, so its position would not be saved: Session(..., loader=loader)"
        )

    def log(self, **metrics: object) -> None:
        """Notes values of this step for the next commit (the last ones count): numbers, texts, and tensors of one
        number, which are read only when a commit needs them.

        Raises:
            InvalidRequest: A value is nothing of that.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                self._metrics[name] = value.detach().clone()  # the program may go on adding to it
            elif callable(item := getattr(value, "item", None)) and getattr(value, "size", 0) == 1:
                self._metrics[name] = item()
            elif isinstance(value, (bool, int, float, str)):
                self._metrics[name] = value
            else:
                raise InvalidRequest(f"{name} is a {type(value).__qualname__}; metrics are numbers and texts")

    def save(self, *, tags: Sequence[str] = ()) -> None:
        """Asks for a commit of this step, when it ends; outside of a loop it is made now, and durable."""
        self._tags = (*self._tags, *tags_of(tags))
        self._due = True
        if self._loop is None:
            self._check_whole()
            self._save(durable=True)

    def stop(self) -> None:
        """Asks the loop to end after this step, with a commit. In a job it ends after the next one, on all ranks."""
        self._stopping.ask()

    def _set_in_step(self, value: bool) -> None:
        self._in_step = value
        for loader in self._loaders:
            loader.in_step = value

    def _end_loop(self) -> None:
        self._loop = None
        self._stopping.rest()

    def _check_whole(self) -> None:
        if self._in_step:
            raise InvalidRequest(
                f"step {self.step + 1} was left in its middle (break, or an exception), so what there is now belongs "
                "to no step; call run.stop() instead of break, or begin the session anew"
            )

    def _end_step(self, n: int) -> bool:
        """Saves what is due; whether the loop ends."""
        if self._keeping is not None:
            self._keeping.look()
        ends = self._stopping.after(self.step) or self.step == n
        if ends or self._due or self.step % self._every == 0:
            if self._stopping.signal is not None:
                say(f"tierload: SIGTERM: saving step {self.step}, then the process ends; a second signal ends at once")
            self._save(durable=ends)
        else:
            self._prepare()
        return ends

    def _save(self, *, durable: bool) -> None:
        store = self._opened()
        metrics = {name: _read(value) for name, value in self._metrics.items()}
        state = self._with_heat()
        if durable:
            store.save(state, step=self.step, metrics=metrics, tags=self._tags, heat=self.meter)
        else:
            if self._due and store.settings.on_busy == "skip":
                store.wait()  # what was asked for, with its tags, is this step and no later one
            pending = store.async_save(state, step=self.step, metrics=metrics, tags=self._tags, heat=self.meter)
            if pending.skipped:
                return  # what was logged is for the next one
            if self._keeping is not None:
                self._keeping.saved(pending)
        self._metrics, self._tags, self._due = {}, (), False

    def _prepare(self) -> None:
        """Once, after a step with all states of optimizers there: the first save is as fast as the others."""
        if not self._prepared and (self.hot_start is None or self.hot_start.ready):
            self._prepared = True
            self._opened().prepare(self._with_heat())

    def _with_heat(self) -> dict[str, Any]:
        return self._state if self.meter is None else self._state | {HEAT: self.meter}

    def _leave(self) -> None:
        """Ends the program, if a signal wants it."""
        if self._stopping.signal is not None:
            raise SystemExit(128 + self._stopping.signal)

    def _opened(self) -> Store:
        if self._store is None:
            raise InvalidRequest(f"{self._path}: a session is for inside of `with tierload.Session(...) as run:`")
        return self._store


def _read(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else value
