"""``TierloadCallback`` says where to, ``TierloadMixin`` does it, ``resume`` is the one call that begins or goes on.

A callback alone is not told of the trainer, cannot keep it from writing ``checkpoint-N/`` and cannot make it find a
store. So what saves and loads is a mixin, of the trainer's own methods for that; ``resume`` gives it to a trainer whose
class does not have it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import transformers
from transformers import Trainer, TrainerCallback

from tierload.api import open as open_store
from tierload.api import rollback
from tierload.engine import HotStart, PendingSave
from tierload.errors import InvalidRequest
from tierload.hooks.transformers import commits
from tierload.hooks.transformers.keeping import Keeper
from tierload.settings import Settings
from tierload.types import Commit

__all__ = ["TierloadCallback", "TierloadMixin", "resume"]

_log = logging.getLogger(__name__)

_REPLACED = (
    "_save_checkpoint _load_from_checkpoint _load_optimizer_and_scheduler _load_scaler _load_rng_state _load_best_model"
).split()
_USED = "_save _load_callback_state get_batch_samples store_flos train".split()

_missing = [name for name in _REPLACED + _USED if not hasattr(Trainer, name)]
if _missing:
    raise ImportError(
        f"the Trainer of transformers {transformers.__version__} has no {', '.join(_missing)}, which tierload's hook "
        "takes the place of: use a release that it was tested with (5.24)"
    )


class TierloadCallback(TrainerCallback):
    """Where a trainer's commits go: the store at ``path`` (made when it is not there), written with ``settings``.

    It takes effect in a trainer that is a ``TierloadMixin``, or that is started by ``resume``. With ``heat=True`` (or a
    ``tierload.heat.HeatMeter`` of the program's) commits have the heat of their tensors, and what the meter has
    measured, from which a resumed training goes on; ``meter`` is that of the newest training. With ``hot_start=True``
    weights and states of the optimizer arrive while a resumed training has begun (``Store.hot_start``).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Settings | None = None,
        *,
        heat: HeatMeter | bool = False,
        hot_start: bool = False,
    ) -> None:
        self._keeper = Keeper(os.fspath(path), settings, heat, hot_start)

    @property
    def meter(self) -> HeatMeter | None:
        """What follows the training; None before it begins, and without ``heat``."""
        return self._keeper.meter

    @property
    def hot_start(self) -> HotStart | None:
        """How far it is with what the newest training goes on from; None where it was loaded at once, or is new."""
        return self._keeper.hot_start

    @property
    def pending(self) -> PendingSave | None:
        """The newest save that was not skipped. A callback that changes weights between the steps does it inside its
        ``mutating()``."""
        return self._keeper.pending

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuses a trainer that would save by itself, lets its optimizer wait for what is being copied, and notes what
        batches are drawn with: those of this loader, for others may be made while it trains."""
        if not self._keeper.trains:
            raise InvalidRequest(
                f"{self._keeper.path}: this trainer would not save here. Start it with "
                "tierload.hooks.transformers.resume(trainer), or make its class of TierloadMixin and Trainer"
            )
        self._keeper.guards(kwargs["optimizer"], len(state.log_history))
        self._keeper.measures(kwargs["model"], kwargs["optimizer"])
        self._keeper.draws(kwargs["train_dataloader"], skips=not args.ignore_data_skip)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is saved from now on is of this step."""
        self._keeper.stepped()


if TYPE_CHECKING:
    from tierload.heat import HeatMeter

    _Base: Any
else:
    _Base = object


class TierloadMixin(_Base):  # type: ignore[misc]
    """A ``Trainer`` that commits to a store: ``class MyTrainer(TierloadMixin, Trainer)``, with a ``TierloadCallback``
    among its callbacks.

    Everything that decides about saving is as it was: ``save_strategy``, ``save_steps``, ``save_total_limit``,
    ``load_best_model_at_end`` (the best commit has the tag ``best``), ``save_only_model``. Saves are asynchronous, and
    durable when ``train`` returns.
    """

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains. ``resume_from_checkpoint``: True (the newest commit), a step (int), a tag or commit id (text), or a
        folder of transformers' own, from which one may change over. An older commit is rolled back to first.

        Raises:
            StoreNotFound, CommitNotFound: There is no such commit; ``resume`` then begins anew.
            InvalidRequest: The commit lacks what a training needs, or this way to train is not supported.
            KeyMismatch: The commit is of another model or optimizer: every difference is listed.
        """
        keeper = _keeper(self)
        _refuse(self, trial)
        _tell_replaced(type(self))
        commit = commits.find(keeper.path, resume_from_checkpoint)
        if commit is None:
            return self._train(keeper, None, resume_from_checkpoint, None, *args, **kwargs)
        if not commit.head:
            if self.args.world_size > 1:
                raise InvalidRequest(f"{keeper.path}: roll back to step {commit.step} first (tierload rollback)")
            rollback(keeper.path, commit)
        with commits.resumed(keeper.path, commit) as resumed:
            return self._train(keeper, resumed, resumed.folder, None, *args, **kwargs)

    def _train(self, keeper: Keeper, resumed: commits.Resumed | None, *args: Any, **kwargs: Any) -> Any:
        keeper.begins(self, resumed)
        try:
            result = super().train(*args, **kwargs)
            keeper.finish(self)
            return result
        except BaseException as error:
            keeper.fails(error)
            raise
        finally:
            keeper.ends()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """As ever; where a save may come between this and the optimizer's step, it is noted what it has to save."""
        if self.args.enable_jit_checkpoint:
            _keeper(self).steps()
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        _keeper(self).save(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        if _resumed(self, resume_from_checkpoint) is None:  # else it is loaded together with the optimizer, or not
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if _resumed(self, checkpoint) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            _keeper(self).load(self)

    def _load_scaler(self, checkpoint: Any) -> None:
        if _resumed(self, checkpoint) is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if _resumed(self, checkpoint) is None:
            super()._load_rng_state(checkpoint)
        else:
            _keeper(self).set_generators()

    def _load_callback_state(self) -> None:
        resumed = _keeper(self).resumed
        if resumed is not None:
            resumed.complete(self.state)
        super()._load_callback_state()

    def _load_best_model(self) -> None:
        keeper = _keeper(self)
        if self.state.best_model_checkpoint != keeper.path:
            super()._load_best_model()  # of a checkpoint that was resumed from
            return
        keeper.wait()
        commits.load_best(keeper.path, self.model, self.state.best_global_step)


def resume(
    trainer: Any,
    *,
    step: int | None = None,
    commit: str | Commit | None = None,
    tag: str | None = None,
    hot_start: bool = False,
) -> Any:
    """Trains, from the newest commit, or that of a ``step``, ``commit`` id or ``tag``; from the beginning where there
    is no commit yet. Gives what ``trainer.train()`` gives. See ``TierloadMixin``, which the trainer is from now on.
    ``hot_start``: as of ``TierloadCallback``, which may have said it already.

    Raises:
        CommitNotFound: There is no such commit.
        InvalidRequest: The trainer has no ``TierloadCallback``; or see ``TierloadMixin.train``.
    """
    keeper = _keeper(trainer)
    path, keeper.hot = keeper.path, keeper.hot or hot_start
    if not isinstance(trainer, TierloadMixin):
        own = type(trainer)
        trainer.__class__ = type(f"Tierload{own.__name__}", (TierloadMixin, own), {})
    if step is None and commit is None and tag is None:
        return trainer.train(resume_from_checkpoint=commits.newest(path))
    with open_store(path) as store:
        found = store.find(step=step, commit=commit, tag=tag)
    return trainer.train(resume_from_checkpoint=found)


def _keeper(trainer: Any) -> Keeper:
    found = [each for each in trainer.callback_handler.callbacks if isinstance(each, TierloadCallback)]
    if len(found) != 1:
        number = "no TierloadCallback" if not found else f"{len(found)} TierloadCallbacks"
        raise InvalidRequest(f'this trainer has {number}: give it one, callbacks=[TierloadCallback("runs/x")]')
    return found[0]._keeper


def _resumed(trainer: Any, checkpoint: object) -> commits.Resumed | None:
    """The commit behind a folder that the trainer resumes from; None where it is a checkpoint of transformers' own."""
    resumed = _keeper(trainer).resumed
    return resumed if resumed is not None and resumed.folder == checkpoint else None


def _refuse(trainer: Any, trial: object) -> None:
    args = trainer.args
    if trial is not None:
        raise InvalidRequest("a search over hyperparameters has many runs, and a store is of one: use a store for each")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled:
        raise InvalidRequest("tierload's hook saves models that are whole on each rank: not with DeepSpeed or FSDP yet")
    if args.push_to_hub and args.hub_strategy != "end":
        raise InvalidRequest(
            f'hub_strategy="{args.hub_strategy.value}" pushes folders that are not written any more: use "end"'
        )


def _tell_replaced(own: type) -> None:
    """Says which methods of the user's own trainer are not called any more, since the mixin stands before it."""
    line = own.__mro__[own.__mro__.index(TierloadMixin) + 1 : own.__mro__.index(Trainer)]
    for cls in line:
        for name in _REPLACED:
            if name in vars(cls):
                _log.warning("%s.%s is not called for commits: tierload's takes its place", cls.__qualname__, name)
