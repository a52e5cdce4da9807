"""Which format a path means."""

from __future__ import annotations

from pathlib import Path

from tierload.errors import InvalidRequest

__all__ = ["DCP", "INDEX_SUFFIX", "METADATA", "SAFETENSORS", "TORCH", "dcp_files", "format_of", "known_format"]

SAFETENSORS = "safetensors"
TORCH = "torch"
DCP = "dcp"  # a directory
INDEX_SUFFIX = ".index.json"
METADATA = ".metadata"  # of DCP

_SUFFIXES = {".safetensors": SAFETENSORS} | dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), TORCH)


def known_format(path: Path) -> str | None:
    """The format that a file's suffix names, or None."""
    return _SUFFIXES.get(path.suffix.lower())


def format_of(path: Path, asked: str | None) -> str:
    """The format of a file: the one that was asked for, else that of its suffix.

    Raises:
        InvalidRequest: There is no such format, or the suffix names none.
    """
    if asked is not None and asked not in (SAFETENSORS, TORCH, DCP):
        raise InvalidRequest(f"there is no format {asked!r}; there are {SAFETENSORS}, {TORCH} and {DCP}")
    found = asked or known_format(path)
    if found is None:
        raise InvalidRequest(
            f"{path}: the name does not say the format; end it with one of {', '.join(_SUFFIXES)}, or say "
            f"format (--format) {SAFETENSORS} or {TORCH}"
        )
    return found


def dcp_files(folder: Path) -> tuple[Path, ...]:
    """The files of a directory of DCP, the metadata first; none where it is none. Ranks that saved without a word to
    one another (``use_collectives=False``) have metadata of their own."""
    if not folder.is_dir():
        return ()
    whole = folder / METADATA
    found = (whole,) if whole.is_file() else tuple(sorted(folder.glob(f"__*{METADATA}")))
    return (*found, *sorted(folder.glob("*.distcp"))) if found else ()
