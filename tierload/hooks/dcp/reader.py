"""What DCP's ``load`` reads by: a commit as metadata, and the boxes of tensors that its planners ask for."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tierload.api import open as open_store
from tierload.engine import CommitReader, Store
from tierload.errors import InvalidRequest, RanksDisagree
from tierload.hooks.dcp.naming import commit_named
from tierload.state import Unread
from tierload.state.pause import paused_collection
from tierload.types import Box

__all__ = ["Reader"]


class Reader(StorageReader):
    """Loads from the store at ``path``: ``dcp.load(state, storage_reader=Reader("runs/gpt"))``.

    It reads the newest commit, or that of a ``step``, ``commit`` id or ``tag``, whoever saved it; where a
    ``checkpoint_id`` is passed to DCP, its last name says which, as for ``Writer``. Every byte is verified. Of values
    that each rank had of its own (random states) a rank gets its own. Optimizers that were saved as objects have the
    keys of ``get_optimizer_state_dict``. ``cast``, ``types`` and ``allow_pickle`` are those of ``tierload.load``: other
    than with DCP's own storage, a dtype is converted only if ``cast`` allows it. What keys have to be there is for the
    planner to say (``DefaultLoadPlanner(allow_partial_load=...)``).

    Raises:
        StoreNotFound, CommitNotFound: There is none. (Errors of one rank come as DCP's ``CheckpointException`` on all;
            these two are text in it, for DCP makes an ``AssertionError`` of all that ``read_metadata`` raises.)
        KeyMismatch: Dtypes differ; all keys are named, and nothing was read.
        CorruptPage, CorruptStore: Damage, and where.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        commit: str | None = None,
        tag: str | None = None,
        cast: bool = False,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.step = step
        self.commit = commit
        self.tag = tag
        self.cast = cast
        self.types = tuple(types)
        self.allow_pickle = allow_pickle
        self._named: tuple[int | None, str | None] = None, None  # the step and tag of the checkpoint_id
        self._store: Store | None = None
        self._reader: CommitReader | None = None
        self._flat: dict[str, Any] = {}

    @property
    def checkpoint_id(self) -> str:
        """The store; DCP logs it."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of this step or tag."""
        self._close()
        self._named = (None, None) if checkpoint_id is None else commit_named(checkpoint_id, self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path and name will do."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    # Not `kwargs`: by that name DCP knows a reader that has metadata of each rank to fall back to.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """What the commit holds, from its document alone: every tensor as one whole chunk."""
        self._close()
        store = self._store = open_store(self.path)
        (step, tag), self._named = self._named, (None, None)  # of this load only
        commit = None
        if step is None and tag is None:
            step, commit, tag = self.step, self.commit, self.tag
        reader = self._reader = store.reader(
            step=step, commit=commit, tag=tag, types=self.types, allow_pickle=self.allow_pickle
        )
        name = f"commit {reader.commit.id[:12]} (step {reader.commit.step})"
        if not isinstance(reader.state, Mapping):
            raise InvalidRequest(f"{self.path}: {name} holds a {type(reader.state).__qualname__}; DCP loads dicts")
        try:
            self._flat, mappings = flatten_state_dict(dict(reader.state))
        except ValueError as error:
            raise InvalidRequest(f"{self.path}: {name} has keys that DCP cannot tell apart: {error}") from error
        with paused_collection():
            described = {fqn: _described(value) for fqn, value in self._flat.items()}
        return Metadata(
            state_dict_metadata=described,
            planner_data=mappings,
            storage_data={"commit": reader.commit.id},
            storage_meta=StorageMeta(checkpoint_id=self.path, load_id=reader.commit.id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the metadata is this reader's own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tells the coordinator which commit is read here."""
        return dataclasses.replace(plan, storage_data=self._open.commit.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: that all ranks read the same commit.

        Raises:
            RanksDisagree: They do not: someone saves meanwhile, or they were told different ones.
        """
        differences = [
            f"rank {rank} reads commit {plan.storage_data[:12]}, and rank 0 {plans[0].storage_data[:12]}"
            for rank, plan in enumerate(plans)
            if plan.storage_data != plans[0].storage_data
        ]
        if differences:
            raise RanksDisagree(f"{self.path}: nothing was read", differences=differences)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads everything of this rank at once: values, then boxes of tensors, which go where the planner says."""
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        texts: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                texts.append(item)
            else:
                tensors.append((item, planner.resolve_tensor(item).detach()))
        values = self._values([item.storage_index.fqn for item in texts])
        self._open.read(
            [
                (self._flat[item.storage_index.fqn], Box(tuple(item.storage_offsets), tuple(item.lengths)), target)
                for item, target in tensors
            ],
            cast=self.cast,
        )
        for item, target in tensors:
            planner.commit_tensor(item, target)
        for item, value in zip(texts, values, strict=True):
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            planner.load_bytes(item, file)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _open(self) -> CommitReader:
        if self._reader is None:
            raise InvalidRequest(f"{self.path}: read_metadata comes before everything else")
        return self._reader

    def _values(self, fqns: Sequence[str]) -> list[Any]:
        """The values that are no tensors, read as far as they have to be."""
        found = [self._flat[fqn] for fqn in fqns]
        marks = [mark for value in found for mark in _marks(value)]
        read = dict(zip(map(id, marks), self._open.values(marks) if marks else (), strict=True))
        return [_filled(value, read) for value in found]

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = self._reader = None
        self._flat = {}


def _described(value: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * value.dim()), sizes=value.size())
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [whole])


def _marks(value: object) -> Iterator[Unread]:
    """What is to be read of a value; a list without tensors or dicts is one to DCP."""
    if isinstance(value, Unread):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _marks(inner)


def _filled(value: object, read: Mapping[int, Any]) -> Any:
    if isinstance(value, Unread):
        return read[id(value)]
    return [_filled(inner, read) for inner in value] if isinstance(value, list) else value
