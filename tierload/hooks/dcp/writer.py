"""What DCP's ``save`` writes by: the state of its planner as one commit."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tierload.api import writing
from tierload.engine import place
from tierload.errors import InvalidRequest, RanksDisagree
from tierload.hooks.dcp.naming import commit_named
from tierload.hooks.dcp.planned import state_of
from tierload.hooks.dcp.staging import stage
from tierload.settings import Settings
from tierload.types import SaveReport

if TYPE_CHECKING:
    from tierload.heat import HeatMeter

__all__ = ["Writer"]

_log = logging.getLogger("tierload")


class Writer(StorageWriter, AsyncStager):
    """Saves into the store at ``path``: ``dcp.save(state, storage_writer=Writer("runs/gpt", step=100))``.

    ``step``, ``metrics``, ``tags``, ``note``, ``settings``, ``allow_pickle``, ``heat`` are those of ``tierload.save``
    (the copies that ``async_save`` makes are not the meter's parameters, and have no heat). Where a
    ``checkpoint_id`` is passed to DCP, the number at its end is the step, or else its last name a tag; the path stays.
    All ranks of the job make one commit; with ``no_dist=True``, or a group of one rank, this rank makes one by itself.
    ``report`` is the ``SaveReport`` of the last save, in the process that did it. The store is held during a save only.
    For ``async_save`` it is the stager, too, unless another one is passed: the call copies everything before it
    returns, into memory that is kept for the next one.

    Raises:
        UnsupportedValue: A value of the state cannot be stored; it names the key. Nothing was written. (Errors of one
            rank come as DCP's ``CheckpointException`` on all of them, at once.)
        InvalidRequest: The group has some of the job's ranks, or the planner keeps no state (``state_dict``).
        StoreBusy, StoreIOError, RanksDisagree, RankLost: As for ``tierload.save``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metrics: Mapping[str, object] | None = None,
        tags: Sequence[str] = (),
        note: str = "",
        settings: Settings | None = None,
        allow_pickle: bool = False,
        heat: HeatMeter | None = None,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.step = step
        self.metrics = metrics
        self.tags = tuple(tags)
        self.note = note
        self.settings = settings
        self.allow_pickle = allow_pickle
        self.heat = heat
        self.report: SaveReport | None = None
        self._named: tuple[int | None, str | None] = None, None  # the step and tag of the checkpoint_id
        self._collectives = True
        self._alone = False

    @property
    def checkpoint_id(self) -> str:
        """The store; DCP logs it."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, of this step or with this tag."""
        self._named = (None, None) if checkpoint_id is None else commit_named(checkpoint_id, self.path)

    def storage_meta(self) -> StorageMeta:
        """What planners are told, and the metadata that ``save`` returns: the id of the last commit is ``save_id``."""
        return StorageMeta(checkpoint_id=self.path, save_id=None if self.report is None else self.report.commit.id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path and name will do."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, whose values no training changes."""
        return stage(state_dict, self.path)

    _synchronize_after_execute = False  # the copy is whole when ``stage`` returns

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Is told whether DCP's ranks speak to one another."""
        self._collectives = kwargs.get("use_collectives", True)
        self._alone = kwargs.get("rank", place()[0]) != place()[0]  # so it is without a group on other ranks than 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: that the group is all of the job, or one rank."""
        ranks = place()[1]
        if self._collectives and len(plans) != ranks:
            if len(plans) > 1:
                raise InvalidRequest(
                    f"{self.path}: the process group has {len(plans)} of the job's {ranks} ranks, and a commit is by "
                    "all of them: call save on every rank without process_group (what ranks have as replicas is stored "
                    "once), or with no_dist=True on one rank"
                )
            self._alone = True
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Saves what the planner has, all of it: which rank writes what is not for its plan to say, since equal values
        are found to be so by what they are."""
        try:
            report = self.report = self._save(planner)
        except Exception as error:
            if threading.current_thread() is not threading.main_thread():  # nobody may ever ask for the result
                _log.error("%s: a save in the background failed: %s", self.path, error)
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), report.written_bytes, report.commit.id)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all have saved: it is committed already, and by all of them as one.

        Raises:
            RanksDisagree: They have made several commits, each by itself (``Settings(ranks="one")``).
        """
        commits = sorted({one.storage_data for written in results for one in written})
        if len(commits) != 1:
            raise RanksDisagree(f"{self.path}: the ranks made {len(commits)} commits in one save: {', '.join(commits)}")
        metadata.storage_data = {"commit": commits[0]}
        metadata.storage_meta = self.storage_meta()

    def _save(self, planner: SavePlanner) -> SaveReport:
        settings = self.settings
        if self._alone:
            settings = dataclasses.replace(settings or Settings(), ranks="one")
        with writing(self.path, settings) as store:
            try:
                state = state_of(planner)
            except BaseException as error:
                if store.together:
                    store.refuse(error)  # the other ranks wait for this one
                raise
            (step, tag), self._named = self._named, (None, None)  # of this save only
            return store.save(
                state,
                step=self.step if step is None else step,
                metrics=self.metrics,
                tags=self.tags if tag is None else (*self.tags, tag),
                note=self.note,
                allow_pickle=self.allow_pickle,
                heat=self.heat,
            )
