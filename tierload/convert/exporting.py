"""An export: load → fit to the format → write under temporary names → read back and compare → publish."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tierload.convert import safetensors_file, torch_file
from tierload.convert.dcp_state import DcpState
from tierload.convert.draft import Draft, DraftFolder
from tierload.convert.formats import DCP, INDEX_SUFFIX, SAFETENSORS, TORCH, dcp_files, format_of
from tierload.convert.leaves import below
from tierload.convert.naming import flat_state, tally
from tierload.convert.report import ConvertReport
from tierload.engine import Store
from tierload.errors import InvalidRequest
from tierload.state.keys import KeyFilter
from tierload.state.keys import Path as KeyPath
from tierload.types import Commit

__all__ = ["export_state"]

_MODEL = "model.safetensors"  # what transformers looks for in a folder
_PARTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def export_state(
    store: str | os.PathLike[str] | Store,
    to: str | os.PathLike[str],
    *,
    step: int | None = None,
    commit: str | Commit | None = None,
    tag: str | None = None,
    keys: str | Sequence[str] | None = None,
    root: str | None = None,
    format: str | None = None,
    max_shard_bytes: int | None = None,
    force: bool = False,
) -> ConvertReport:
    """Writes a commit (the head) into a file that torch or safetensors reads, and compares it with the store.

    ``to`` is a file, whose suffix says the format (else ``format``: ``"safetensors"`` or ``"torch"``), or a folder
    (one that exists, or a path that ends with ``/``), which gets ``model.safetensors``; with ``max_shard_bytes`` shards
    and their index. With ``format="dcp"`` it is a directory that ``torch.distributed.checkpoint.load`` reads. ``keys``
    are patterns as in ``load``; ``root`` is the key of the part that is exported as if it were the whole state. Of a
    commit by several ranks tensors are whole, and what each rank has of its own is that of rank 0; the report lists it.
    Files appear when they are whole and compared; existing ones are replaced with ``force`` only.

    Raises:
        InvalidRequest: The target exists, or its name does not say the format.
        CommitNotFound, KeyMismatch: There is no such commit or key.
        CorruptPage, CorruptStore: What is to be exported is damaged.
        CorruptFile: What was read back is not what was written; nothing is left of it.
        OSError: The disk is full or failed; nothing is left of what was written.
    """
    if format == DCP and max_shard_bytes is not None:
        raise InvalidRequest(f"{to}: shards of a size are for safetensors, and not for a directory of DCP")
    folder = format == DCP or str(to).endswith(os.sep) or os.path.isdir(to) or max_shard_bytes is not None
    target = Path(os.path.realpath(to))  # a link's target is replaced, not the link
    kind = format_of(Path(_MODEL), format) if folder else format_of(Path(to), format)
    if folder and kind == TORCH:
        raise InvalidRequest(f"{to}: a file of torch.save is one file: name it, as in {Path(to) / 'state.pt'}")
    if max_shard_bytes is not None and (max_shard_bytes < 1 or (target.exists() and not target.is_dir())):
        raise InvalidRequest(f"{to}: shards of at least 1 byte go into a folder, and that is none")
    old = _existing(target, folder) if format != DCP else _existing_directory(target)
    if old and not force:
        raise InvalidRequest(f"{old[0]} exists already; force (--force) replaces it")
    with contextlib.ExitStack() as stack:
        opened = store if isinstance(store, Store) else stack.enter_context(Store(store, mode="r"))
        found = opened.find(step=step, commit=commit, tag=tag)
        wanted = [glob.escape(root)] if root and keys is None else keys
        state = opened.load(commit=found, keys=wanted, rank=0)
        own = _wanted(opened.own_keys(found), wanted)
    if root:
        state = below(state, root)
    place = (target, _MODEL) if folder else (target.parent, target.name)
    export = {SAFETENSORS: _export_safetensors, TORCH: _export_torch, DCP: _export_dcp}[kind]
    return replace(export(state, found, place, max_shard_bytes, old), own=own)


def _wanted(keys: Sequence[str], patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Those keys of which, or of what is below which, something is exported."""
    if patterns is None:
        return tuple(keys)
    chosen = KeyFilter(patterns)
    paths = {key: KeyPath.of_text(key) for key in keys}
    return tuple(key for key, path in paths.items() if chosen.wants(path) or chosen.below(path))


def _existing(target: Path, folder: bool) -> tuple[Path, ...]:
    """What an export takes the place of, the index first: without it nobody takes shards for a model."""
    if not folder:
        return (target,) if target.exists() else ()
    found = [path for path in target.glob("model*") if _PARTS.fullmatch(path.name)]
    return tuple(sorted(found, key=lambda path: (path.suffix != ".json", path.name)))


def _existing_directory(target: Path) -> tuple[Path, ...]:
    """A directory of DCP that an export takes the place of.

    Raises:
        InvalidRequest: There is something else.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return ()
    if not dcp_files(target):
        raise InvalidRequest(f"{target} is there already, and is no directory of DCP: name a new one")
    return (target,)


Exporter = Callable[[object, Commit, tuple[Path, str], int | None, tuple[Path, ...]], ConvertReport]


def _export_torch(
    state: object, commit: Commit, place: tuple[Path, str], max_shard_bytes: int | None, old: tuple[Path, ...]
) -> ConvertReport:
    loadable = torch_file.Loadable(state)
    with Draft(place[0]) as draft:
        path = draft.file(place[1])
        torch_file.write(loadable.state, path)
        torch_file.check(loadable.state, path)
        files = draft.publish(instead_of=old)
    return _report(TORCH, loadable, files, commit)


def _export_dcp(
    state: object, commit: Commit, place: tuple[Path, str], max_shard_bytes: int | None, old: tuple[Path, ...]
) -> ConvertReport:
    from tierload.convert import dcp_folder  # half a second, for which no other export should wait

    fitted = DcpState(state)
    with DraftFolder(place[0]) as draft:
        dcp_folder.write(fitted.state, draft.path, place[0])
        dcp_folder.check(fitted.state, draft.path)
        draft.publish()
    return _report(DCP, fitted, dcp_files(place[0]), commit)


def _report(kind: str, fitted: torch_file.Loadable | DcpState, files: Iterable[Path], commit: Commit) -> ConvertReport:
    """What an export of a nested state has kept."""
    tensors, size, values, ties = tally(fitted.state)
    return ConvertReport(
        format=kind,
        files=tuple(map(str, files)),
        commit=commit,
        tensors=tensors,
        bytes=size,
        values=values,
        ties=ties,
        changed=tuple(fitted.changed),
        left_out=tuple(fitted.left_out),
    )


def _export_safetensors(
    state: object, commit: Commit, place: tuple[Path, str], max_shard_bytes: int | None, old: tuple[Path, ...]
) -> ConvertReport:
    folder, name = place
    fitted = flat_state(state)
    flat = fitted.flat
    shards = _shards(flat.tensors, max_shard_bytes)
    count = len(shards)
    names = [name] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    texts = flat.metadata()
    plain = {key: text for key, text in texts.items() if key in flat.texts or key == "format"}
    with Draft(folder) as draft:
        for number, (shard, tensors) in enumerate(zip(names, shards, strict=True)):
            path = draft.file(shard)
            own = plain if number else texts  # what concerns the whole is in the first shard only
            safetensors_file.write(tensors, own, path)
            safetensors_file.check(tensors, own, path)
        if len(shards) > 1:
            index = _index(names, shards)
            draft.file(_MODEL + INDEX_SUFFIX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        files = draft.publish(instead_of=old)
    return ConvertReport(
        format=SAFETENSORS,
        files=tuple(map(str, files)),
        commit=commit,
        tensors=len(flat.tensors),
        bytes=sum(tensor.nbytes for tensor in flat.tensors.values()),
        values=len(flat.values),
        ties=flat.ties,
        changed=tuple(fitted.changed),
        left_out=tuple(fitted.left_out),
    )


def _shards(tensors: Mapping[str, torch.Tensor], limit: int | None) -> list[dict[str, torch.Tensor]]:
    """Tensors in their order, in shards of at most ``limit`` bytes; a larger tensor is a shard by itself."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _index(names: Sequence[str], shards: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, object]:
    """The index of shards, as transformers reads it."""
    where = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
