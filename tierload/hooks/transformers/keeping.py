"""What one trainer's saves have between them: where they go, what is under way, and what its batches are drawn with."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from tierload.api import async_save, guard
from tierload.api import open as open_store
from tierload.engine import HotStart, PendingSave
from tierload.errors import TierloadError
from tierload.hooks.metering import HEAT, check, meter_of, stored_heat
from tierload.hooks.transformers import commits
from tierload.hooks.transformers.batches import DrawnBatches, drawn, generators, set_generators
from tierload.hooks.transformers.files import files_of
from tierload.settings import Settings
from tierload.state import RNG, Folder

if TYPE_CHECKING:
    from tierload.heat import HeatMeter

__all__ = ["Keeper"]

_log = logging.getLogger(__name__)


class Keeper:
    """Saves a trainer into the store at ``path``, and knows the commit that it goes on from while it trains."""

    def __init__(self, path: str, settings: Settings | None, heat: HeatMeter | bool, hot: bool) -> None:
        check(heat)
        self.path = path
        self.meter: HeatMeter | None = None  # while a trainer trains
        self.hot_start: HotStart | None = None
        self.hot = hot
        self._heat = heat
        self.settings = settings
        self.trains = False
        self.resumed: commits.Resumed | None = None
        self.pending: PendingSave | None = None
        self._files: Folder | None = None
        self._logged = 0  # entries of the log that earlier commits have
        self._batches: DrawnBatches | None = None
        self._replays = False
        self._before_step: tuple[object, dict[str, Any] | None] | None = None

    def begins(self, trainer: Any, resumed: commits.Resumed | None) -> None:
        """A trainer that saves here begins to train, from a commit or anew."""
        self.resumed, self.trains, self._files, self.hot_start = resumed, True, None, None
        store = open_store(self.path, mode="w", settings=self.settings)  # now, and not when hours have been trained
        if resumed is None:
            head = store.head()
            if head is not None:
                _log.warning("%s has commits up to step %s, and training begins anew", self.path, head.step)
        elif resumed.best is not None and trainer.is_world_process_zero():
            store.tag(commits.BEST, resumed.best)  # another one may have been the best before a rollback

    def load(self, trainer: Any) -> None:
        """Everything of the commit that is loaded in place, now or while it is used."""
        assert self.resumed is not None
        parts = commits.live_parts(trainer)
        if self.hot:
            self.hot_start = self.resumed.hot_start(parts)
        else:
            self.resumed.load(parts)

    def finish(self, trainer: Any) -> None:
        """Its training is over, and everything there and durable."""
        if self.hot_start is not None:
            self.hot_start.join()
            self.hot_start.close()
        self.wait()
        self._collect(trainer)

    def fails(self, error: BaseException) -> None:
        """It ends with an error: what it has saved is durable before that goes on, for who catches it may resume."""
        try:
            if self.pending is not None:
                self.pending.result(progress=True)
        except TierloadError as failure:
            if failure is not error:
                error.add_note(f"Besides, {failure}")

    def ends(self) -> None:
        """It trains no more, whatever the reason."""
        self.resumed, self.trains, self._before_step = None, False, None
        if self._heat is True and self.meter is not None:
            self.meter.close()

    def draws(self, loader: Any, *, skips: bool) -> None:
        """Batches come from here; those that an interrupted epoch had are skipped if ``skips``."""
        self._batches, self._replays = drawn(loader), False
        if self._batches is not None and skips and self.resumed is not None and self.resumed.batches is not None:
            self._batches.replay(self.resumed.batches, self.resumed.rng)
            self._replays = True

    def set_generators(self) -> None:
        """The generators are to be as they were at the commit; they are, where its epoch goes on."""
        assert self.resumed is not None
        if not (self._replays and self._batches is not None and self._batches.replayed()):
            set_generators(self.resumed.rng)

    def guards(self, optimizer: Any, logged: int) -> None:
        """The optimizer, accelerate's or torch's own, waits for what is being copied. So much is logged already."""
        self._logged = logged
        guarded = guard(getattr(optimizer, "optimizer", optimizer))
        if guarded.reason:
            _log.warning("saves copy everything before they return: %s", guarded.reason)

    def measures(self, model: Any, optimizer: Any) -> None:
        """A meter follows the training, if one is wanted, from what the commit has that it goes on from."""
        if self._heat is False:
            return
        self.meter = meter_of(model, getattr(optimizer, "optimizer", optimizer)) if self._heat is True else self._heat
        if self.resumed is not None:
            with open_store(self.path) as store:
                measured = stored_heat(store, commit=self.resumed.commit)
            if measured is not None:
                self.meter.load_state_dict(measured)

    def steps(self) -> None:
        """Batches for the next step are about to be drawn: a save before its optimizer's is one of this moment."""
        self._before_step = (generators(), self._drawn())

    def stepped(self) -> None:
        """The optimizer's step is done: a save is of the moment again."""
        self._before_step = None

    def _drawn(self) -> dict[str, Any] | None:
        return None if self._batches is None else self._batches.drawn

    def save(self, trainer: Any) -> None:
        """Begins a commit of a trainer as it is."""
        state = trainer.state
        best = bool(state.best_global_step) and state.best_global_step == state.global_step
        if best:
            state.best_model_checkpoint = self.path
        if self._files is None:
            self._files = files_of(trainer)
        content: dict[str, Any] = {"trainer_state": commits.trainer_state(trainer), "files": self._files}
        if trainer.args.save_only_model:
            content["model"] = trainer.model
        else:
            rng, batches = self._before_step or (RNG(), self._drawn())
            content |= commits.live_parts(trainer) | {"rng": rng, "batches": batches}
            content |= {} if self.meter is None else {HEAT: self.meter}
        metrics = commits.metrics_of(state.log_history[self._logged :])
        self._collect(trainer)
        tags: tuple[str, ...] = ()
        settings = self.settings
        if best:
            tags = (commits.BEST,)
            if settings is not None and settings.on_busy == "skip":
                settings = dataclasses.replace(settings, on_busy="wait")  # it is asked for again when training ends
        pending = async_save(
            content,
            self.path,
            step=state.global_step,
            metrics=metrics,
            tags=tags,
            settings=settings,
            heat=self.meter,
        )
        if not pending.skipped:  # else what was logged is for the next one
            self.pending, self._logged = pending, len(state.log_history)

    def _collect(self, trainer: Any) -> None:
        """Leaves ``save_total_limit`` commits: the newest, and the best in place of the oldest of them."""
        limit = trainer.args.save_total_limit
        if not limit or limit < 1 or not trainer.is_world_process_zero():
            return
        commits.collect(open_store(self.path, mode="w", settings=self.settings), limit)

    def wait(self) -> None:
        """Returns when everything is durable; raises what went wrong."""
        if self.pending is not None:
            self.pending.result()
