"""What is to be imported: files, their shards and indexes, folders of them, and directories of DCP."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierload.convert.formats import DCP, INDEX_SUFFIX, dcp_files, format_of, known_format
from tierload.errors import CorruptFile, InvalidRequest

__all__ = ["Source", "find_sources"]

_SHARD = re.compile(r"(.+?)[-_.](\d{1,9})-of-(\d{1,9})")
_SAME_MODEL = {"model", "pytorch_model"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file, the shards of one, or a directory, as ``name`` without suffix. ``where`` is the index: which shard has
    each tensor."""

    name: str
    format: str
    files: tuple[Path, ...]
    where: dict[str, str] | None = None


def find_sources(paths: Sequence[Path], asked: str | None) -> tuple[list[Source], tuple[str, ...]]:
    """What ``paths`` mean, and the files of folders that are not read.

    Raises:
        InvalidRequest: A name does not say the format, or two sources have the same name.
        CorruptFile: A shard is missing, or an index is damaged.
        OSError: A path is not there.
    """
    sources: list[Source] = []
    loose: list[Path] = []
    skipped: list[str] = []
    for path in paths:
        written = dcp_files(path)
        if written:
            sources.append(Source(path.name or path.resolve().name, DCP, written))
        elif asked == DCP:
            raise CorruptFile(f"{path}: has no .metadata: it is no checkpoint of DCP, or its save did not finish")
        elif path.is_dir():
            found, files, others = _in_folder(path)
            sources += found
            loose += files
            skipped += others
        else:
            path.stat()  # an error that names it
            if path.name.endswith(INDEX_SUFFIX):
                sources.append(_indexed(path))
            else:
                loose.append(path)
    sources += _together(loose, asked)
    if not sources:
        raise InvalidRequest(f"{', '.join(map(str, paths))}: no file of safetensors or torch.save in there")
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRequest(f"two of the files are called {twice[0]!r}: import them one by one")
    if set(names) >= _SAME_MODEL:
        raise InvalidRequest(
            f"there is the same model twice, as {' and '.join(sorted(_SAME_MODEL))}: name the file (or the index of "
            "the shards) to import"
        )
    return sources, tuple(skipped)


def _in_folder(folder: Path) -> tuple[list[Source], list[Path], list[str]]:
    """Indexed shards, other files of a known format, and what is neither."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    indexed = [_indexed(path) for path in files if path.name.endswith(INDEX_SUFFIX)]
    taken = {file for source in indexed for file in source.files}
    rest = [path for path in files if path not in taken and not path.name.endswith(INDEX_SUFFIX)]
    loose = [path for path in rest if known_format(path)]
    return indexed, loose, [str(path) for path in rest if not known_format(path)]


def _indexed(path: Path) -> Source:
    try:
        index = json.loads(path.read_bytes())
        where = index["weight_map"]
        shards = sorted({str(name) for name in where.values()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path}: is no index of shards: {error!r}") from error
    if any(os.path.basename(name) != name or name in ("", ".", "..") for name in shards) or not shards:
        raise CorruptFile(f"{path}: is no index of shards: its files have to be beside it")
    missing = [name for name in shards if not (path.parent / name).is_file()]
    if missing:
        raise CorruptFile(f"{path}: the shard {missing[0]!r} is not there")
    model = Path(path.name.removesuffix(INDEX_SUFFIX))
    formats = {format_of(path.parent / name, None) for name in shards}
    if len(formats) > 1:
        raise CorruptFile(f"{path}: its shards are of different formats")
    return Source(model.stem, formats.pop(), tuple(path.parent / name for name in shards), where)


def _together(files: Sequence[Path], asked: str | None) -> list[Source]:
    """Files, with shards of the same name and number taken together.

    Raises:
        CorruptFile: Some of the shards are missing.
    """
    sets: dict[tuple[Path, str, str, str], dict[int, Path]] = defaultdict(dict)
    sources: list[Source] = []
    for path in files:
        found = _SHARD.fullmatch(path.stem)
        if found is None:
            sources.append(Source(path.stem, format_of(path, asked), (path,)))
        else:
            sets[path.parent, found[1], found[3], format_of(path, asked)][int(found[2])] = path
    for (folder, name, total, kind), shards in sets.items():
        missing = sorted(set(range(1, int(total) + 1)) - shards.keys()) if int(total) <= 10**6 else [1]
        if missing:
            raise CorruptFile(f"{folder}: shard {missing[0]} of the {int(total)} of {name!r} is not there")
        sources.append(Source(name, kind, tuple(shards[number] for number in sorted(shards))))
    return sources
