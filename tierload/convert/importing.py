"""An import: read → save as one commit → load what the store holds and compare it with the source."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tierload import api
from tierload.convert import safetensors_file, torch_file
from tierload.convert.bits import bytes_of, problem_of
from tierload.convert.formats import DCP, SAFETENSORS
from tierload.convert.leaves import SelfReference, leaves
from tierload.convert.naming import tally
from tierload.convert.report import ConvertReport
from tierload.convert.sources import Source, find_sources
from tierload.engine import Store
from tierload.errors import CorruptFile, CorruptStore
from tierload.state import flatten
from tierload.types import Commit

__all__ = ["import_state"]

_COMPARED_BYTES = 256 << 20  # of the store at a time, so that a model larger than memory can be imported


def import_state(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    *,
    step: int | None = None,
    tags: Sequence[str] = (),
    note: str = "",
    format: str | None = None,
) -> ConvertReport:
    """Saves files of safetensors or ``torch.save``, or directories of torch.distributed.checkpoint, as one commit, and
    compares what the store then holds with them.

    A file, or the shards of one (by their index or their names), is the state itself, and so is a directory of DCP, by
    however many ranks; several of them are entries of a dict, by their names without suffix; any other folder means the
    files in it. ``format`` (``"safetensors"``, ``"torch"``) is for files whose suffix says nothing. Files of torch, and
    values in those of DCP, are read as ``weights_only`` allows. This process then holds the store until it ends, as
    after ``save``.

    Raises:
        CorruptFile: A source is damaged, incomplete or would run code; the file, the tensor and the reason are named.
        InvalidRequest: The format of a file is not known, or two files have the same name.
        UnsupportedValue: A source holds what the store cannot, such as a tensor without data (meta).
        StoreBusy, StoreIOError: As for ``save``. In all these cases nothing was committed.
        CorruptStore: After the commit, the store does not hold what the source does: a file was changed meanwhile, or
            the disk is failing.
    """
    paths = [Path(path) for path in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)]
    found, skipped = find_sources(paths, format)
    contents = {source.name: _read(source) for source in found}
    state: Any = next(iter(contents.values())) if len(contents) == 1 else contents
    flatten(state)  # what cannot be stored is an error here, before a store is made for it
    saved = api.save(state, store, step=step, tags=tags, note=note)
    with Store(store, mode="r") as reader:
        _compare(reader, saved.commit, state)
    tensors, size, values, ties = tally(state)
    return ConvertReport(
        format=" and ".join(sorted({source.format for source in found})),
        files=tuple(str(path) for source in found for path in source.files),
        commit=saved.commit,
        tensors=tensors,
        bytes=size,
        values=values,
        ties=ties,
        skipped=skipped,
    )


def _read(source: Source) -> object:
    if source.format == SAFETENSORS:
        flat = safetensors_file.read(source.files)
        _check_index(source, flat.tensors)
        return safetensors_file.state_of(flat)
    if source.format == DCP:
        from tierload.convert import dcp_folder  # half a second, for which no other import should wait

        return dcp_folder.read(source.files[0].parent)
    for path in source.files:
        torch_file.check_sums(path, str(path))
    if len(source.files) == 1 and source.where is None:
        return torch_file.read(source.files[0])
    whole: dict[object, object] = {}
    for path in source.files:
        part = torch_file.read(path)
        if not isinstance(part, dict):
            raise CorruptFile(f"{path}: a shard has to be a dict, and this one is a {type(part).__qualname__}")
        twice = [key for key in part if key in whole]
        if twice:
            raise CorruptFile(f"{path}: {twice[0]!r} is in another shard too")
        whole |= part
    _check_index(source, whole)
    return whole


def _check_index(source: Source, found: dict[Any, Any]) -> None:
    missing = sorted(name for name in source.where or () if name not in found)
    if missing:
        raise CorruptFile(f"{source.files[0].parent}: no shard of {source.name!r} holds the tensor {missing[0]!r}")


_ABSENT = object()


def _compare(store: Store, commit: Commit, state: object) -> None:
    """Loads what a commit holds, a part at a time, and compares it with the state that it was made from.

    Raises:
        CorruptStore: They differ.
    """
    groups = list(_groups(state))
    for group in groups:
        # All at once where that is little: then even what has no key of its own is compared.
        problem = _difference(store, commit, group, whole=len(groups) == 1)
        if problem:
            raise CorruptStore(
                f"{store.path}: commit {commit.id[:12]} was made, but it does not hold what was imported: {problem}. "
                "Was the file changed meanwhile? `tierload rollback` goes back"
            )


def _difference(store: Store, commit: Commit, expected: dict[str, object], *, whole: bool) -> str:
    keys = None
    if not whole:
        expected = {key: value for key, value in expected.items() if not isinstance(value, SelfReference)}
        keys = [glob.escape(key) for key in expected]
    found = {place.text(): value for place, value in leaves(store.load(commit=commit, keys=keys), once=True)}
    for key in expected.keys() | found.keys() if whole else expected:
        problem = problem_of(found.get(key, _ABSENT), expected.get(key, _ABSENT))
        if problem:
            return f"key {key!r}: {problem}"
    return ""


def _groups(state: object) -> Iterator[dict[str, object]]:
    """The leaves of a state by key, in groups that are not large."""
    group: dict[str, object] = {}
    size = 0
    for place, value in leaves(state, once=True):
        count = bytes_of(value) if isinstance(value, torch.Tensor) else 0
        if group and size + count > _COMPARED_BYTES:
            yield group
            group, size = {}, 0
        group[place.text()] = value
        size += count
    yield group
